"""Options, reports, errors, the public surface, and the house."""

from __future__ import annotations

import ast
import pickle
import threading
import time
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

import gpurelease
from gpurelease import InvalidOption, ReleaseFailed, RestoreFailed, TransitionFailed, released_world
from gpurelease.errors import ContextFailed, GpuReleaseError, ranks_text
from gpurelease.options import LONGEST, SHORTEST, ScopeOptions
from gpurelease.report import GroupReport, Report, Transition

PACKAGE = Path(gpurelease.__file__).parent


@pytest.mark.parametrize(
    "options, words",
    [
        ({"strategy": "renew"}, "strategy='renew' is not known; there is 'rebuild'"),
        ({"keep": [3]}, "keep= takes process groups, names of groups, or one predicate, and got 3"),
        ({"backends": ("ncl",)}, "'ncl' is not a backend of this torch"),
        ({"backends": ()}, "would release nothing"),
        ({"timeout": 0}, "timeout=0 must be a positive number of seconds"),
        ({"timeout": timedelta(0)}, "must be a positive number of seconds"),
        ({"timeout": "10"}, "must be a positive number of seconds"),
        ({"timeout": True}, "must be a positive number of seconds"),
        ({"timeout": float("nan")}, "must be a positive number of seconds"),
        ({"timeout": -float("inf")}, "must be a positive number of seconds"),
        ({"timeout": Decimal(3)}, "must be a positive number of seconds"),
        ({"timeout": 3j}, "must be a positive number of seconds"),
    ],
)
def test_an_option_that_can_never_work_is_refused_where_it_is_given(options, words):
    with pytest.raises(InvalidOption) as refused:
        released_world(**options)
    assert words in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "given, seconds",
    [
        (5, 5.0),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(7), 7.0),
        (Fraction(1, 4), 0.25),
        (timedelta(milliseconds=1500), 1.5),
        (1e-300, SHORTEST),
        (timedelta(microseconds=1), SHORTEST),
        (float("inf"), LONGEST),
        (10**400, LONGEST),
        (1e300, LONGEST),
        (timedelta.max, LONGEST),
    ],
)
def test_any_number_is_a_time_out_that_every_clock_can_count(given, seconds):
    timeout = ScopeOptions.check("rebuild", (), None, given).timeout
    assert timeout == seconds and type(timeout) is float
    threading.Event().wait(min(timeout, 0.001))
    assert timedelta(seconds=timeout) <= timedelta(days=366)


def test_options_have_one_form():
    from torch.distributed import GroupMember

    options = ScopeOptions.check("rebuild", "tp", "NCCL", timedelta(minutes=2))
    assert options == ScopeOptions("rebuild", ("tp",), ("nccl",), 120.0)
    assert ScopeOptions.check("rebuild", [None, GroupMember.NON_GROUP_MEMBER], None, None).keep == ()
    assert ScopeOptions.check("rebuild", str.isalpha, None, None).keep is str.isalpha


def test_a_report_says_it_in_one_line():
    released = Transition("release", 18, {"roll call": 0.01, "tear down": 0.04}, 7 * 2**30, (6 * 2**30, 8 * 2**30))
    assert str(released) == (
        "released 18 process groups in 0.050 s (roll call 0.010, tear down 0.040), freed 7.00 GiB of device memory "
        "(6.00 GiB to 8.00 GiB over the ranks)"
    )
    restored = Transition("restore", 1, {"build": 0.5}, -(2**30), (-(2**31), -(2**30)))
    assert str(restored) == (
        "restored 1 process group in 0.500 s (build 0.500), took 1.00 GiB of device memory "
        "(1.00 GiB to 2.00 GiB over the ranks)"
    )
    groups = [
        GroupReport("0", "default_pg", (0, 1), "cuda:nccl", True),
        GroupReport("1", "cpu", (0,), "cpu:gloo", False, "x"),
    ]
    report = Report(strategy="rebuild", groups=groups, transitions=[released, restored])
    assert str(report) == f"{released}; {restored}"
    assert [group.name for group in report.released] == ["0"]
    assert [group.name for group in report.kept] == ["1"]
    assert report.freed_bytes == 7 * 2**30
    assert report.suspended_bytes is None and report.stayed_bytes is None
    suspended = GroupReport("2", "dp", (0, 1), "cuda:nccl", True, "", True, 2**30, 2**29)
    report = Report(strategy="suspend", strategy_reason="it can", groups=[*groups, suspended, suspended])
    assert str(report) == "communicators suspended 2.00 GiB and held 1.00 GiB; strategy 'suspend': it can"


def test_a_step_counts_its_seconds_also_when_it_fails():
    transition = Transition("release")
    with pytest.raises(OSError), transition.step("build"):
        time.sleep(0.02)
        raise OSError
    with transition.step("build"):
        time.sleep(0.02)
    assert 0.04 <= transition.seconds["build"] == transition.total_seconds < 1


@pytest.mark.parametrize("kind", [ReleaseFailed, RestoreFailed, ContextFailed])
def test_errors_survive_a_process_pipe(kind):
    error = kind("It failed.", {1: "no memory", 0: "no word"}, [3])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.summary, copy.failures, copy.missing) == ("It failed.", {1: "no memory", 0: "no word"}, (3,))
    assert str(copy) == str(error)
    assert str(error).startswith(f"It failed.\n  rank 0: no word\n  rank 1: no memory\n{kind.state}")


def test_ranks_with_the_same_complaint_are_one_line():
    error = ReleaseFailed("It failed:", dict.fromkeys(range(4096), "no memory") | {7: "a capture"})
    assert str(error).splitlines()[1:3] == ["  ranks 0 to 6 and 8 to 4,095: no memory", "  rank 7: a capture"]


def test_without_a_rank_that_died_there_is_still_a_new_world():
    assert "destroy_process_group() and init_process_group() on the others" in str(RestoreFailed("No.", {}, [3]))
    assert "destroy_process_group" not in str(RestoreFailed("No.", {3: "no memory"}))


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([3], "rank 3"),
        ([0, 2, 5], "ranks 0, 2 and 5"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        (range(4096), "ranks 0 to 4,095"),
        ([0, 1, *range(7, 16)], "ranks 0, 1 and 7 to 15"),
        (range(0, 200, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 92 more"),
    ],
)
def test_ranks_are_named_in_a_few_words(ranks, text):
    assert ranks_text(list(ranks)) == text


def test_the_error_tree_is_the_one_drawn():
    import gpurelease.errors as module

    drawn = [line.split("(")[0].strip(" │├└─") for line in module.__doc__.split("::")[1].splitlines() if "──" in line]
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    ours = [
        name for name, value in classes.items() if issubclass(value, GpuReleaseError) and value is not GpuReleaseError
    ]
    assert sorted(name.split()[0] for name in drawn) == sorted(ours)
    assert issubclass(ReleaseFailed, TransitionFailed)


def test_all_is_the_public_surface():
    public = {name for name, value in vars(gpurelease).items() if not name.startswith("_") and not _is_module(value)}
    assert sorted(gpurelease.__all__) == gpurelease.__all__
    assert public == set(gpurelease.__all__)
    for name in gpurelease.__all__:
        assert getattr(gpurelease, name).__doc__, f"{name} has no docs"


def _is_module(value):
    import types

    return isinstance(value, types.ModuleType)


def test_private_names_of_torch_are_used_in_one_folder_only():
    """``_world``, ``_plugins``, ``_timeout``, ... of torch objects belong in torch_internals/."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name in ("torch_internals", "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "other")
                assert own, f"{path.name}:{node.lineno}: .{node.attr}"


# Each room, above what it uses. What is outside them is the public face.
ROOMS = ["torch_internals", "agreement", "groups", "strategies", "transition", "scopes"]
USED_BY_ALL = ["errors", "options", "report"]


def test_no_room_uses_one_above_it():
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.parent.name
        allowed = USED_BY_ALL + (ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else ROOMS)
        if room == "demo" or path.stem in ("__init__", "api", "decorator"):
            continue
        allowed = ["errors"] if path.stem in USED_BY_ALL else allowed
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpurelease."):
                assert node.module.split(".")[1] in allowed, f"{path}:{node.lineno}: {node.module}"


def test_files_are_read_in_one_go():
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        assert lines <= 300, f"{path}: {lines} lines"
