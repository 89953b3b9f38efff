"""What the README says runs, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.rst").read_text()


def test_the_first_code_runs_as_it_stands():
    code = re.search(r"\.\. code:: python\n\n((?:    .*\n|\n)+)", README).group(1)
    code = "\n".join(line[4:] for line in code.splitlines())
    assert len(code.strip().splitlines()) <= 14
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, report = done.stdout.strip().splitlines()
    assert first == "generate here; WORLD runs on gloo"
    assert report.startswith("released 2 process groups in ")
    assert "; restored 2 process groups in " in report


def test_the_commands_of_the_readme_are_targets():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"``?make ([\w-]+)``|\$ make ([\w-]+)", README):
        name = next(filter(None, target))
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
