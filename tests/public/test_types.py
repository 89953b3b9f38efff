"""What type checkers make of users' code: they take what works, and refuse what cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = Path(__file__).with_name("users_code.py")


def mypy(folder):
    arguments = ["--strict", "--config-file", "", "--follow-imports", "silent", "--cache-dir", folder / "cache"]
    said = run("mypy", *arguments, "--no-error-summary", CODE)
    return {int(line) for line in re.findall(rf"{CODE.name}:(\d+): error", said)}, said


def pyright(folder):
    """The same checker as pyright, from a package that brings its own node, where pyright's would fetch one."""
    settings = folder / "pyrightconfig.json"
    root = CODE.parents[2]
    settings.write_text(json.dumps({"include": [str(CODE)], "extraPaths": [str(root)], "typeCheckingMode": "strict"}))
    said = run("basedpyright", "--project", settings, "--pythonpath", sys.executable, "--outputjson")
    found = [each for each in json.loads(said)["generalDiagnostics"] if each["severity"] == "error"]
    told = {each["range"]["start"]["line"] + 1: each["message"] for each in found}
    return set(told), "\n".join(f"{line}: {message}" for line, message in told.items())


def run(module, *arguments):
    """Return what a checker says. It ends with 1 if it has found something to refuse."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=CODE.parents[2])
    assert done.returncode == 1, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_users_code_is_taken_and_what_cannot_work_is_refused(checker, tmp_path):
    lines = CODE.read_text().splitlines()
    refused = {number for number, line in enumerate(lines, 1) if "# refused:" in line}
    found, said = checker(tmp_path)
    assert found == refused, said
