"""Settings, reports, errors, and the public surface."""

from __future__ import annotations

import ast
import pickle
import time
from datetime import timedelta
from pathlib import Path

import pytest

import gpurelease
from gpurelease import InvalidOption, ReleaseFailed, RestoreFailed, TransitionFailed, released_world
from gpurelease.errors import GpuReleaseError
from gpurelease.parallel import run_all
from gpurelease.report import GroupReport, Report, Transition
from gpurelease.settings import ScopeOptions

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
    ],
)
def test_an_option_that_can_never_work_is_refused_where_it_is_given(options, words):
    with pytest.raises(InvalidOption) as refused:
        released_world(**options)
    assert words in str(refused.value)
    assert isinstance(refused.value, ValueError)


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


@pytest.mark.parametrize("kind", [ReleaseFailed, RestoreFailed])
def test_errors_survive_a_process_pipe(kind):
    error = kind("It failed.", {1: "no memory", 0: "no word"}, [3])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.summary, copy.failures, copy.missing) == ("It failed.", {1: "no memory", 0: "no word"}, (3,))
    assert str(copy) == str(error) == f"It failed.\n  rank 0: no word\n  rank 1: no memory\n{kind.state}"


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
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"), (
                    f"{path.name}:{node.lineno}: .{node.attr}"
                )


def test_data_flows_one_way():
    """errors, settings and report import nothing of ours but errors."""
    for name in ("errors", "settings", "report"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        ours = {
            n.module
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("gpurelease")
        }
        assert ours <= {"gpurelease.errors"}, (name, ours)


def test_run_all_returns_what_each_job_raised_and_waits_no_longer_than_it_may():
    import threading

    never = threading.Event()

    def fails():
        raise OSError("no")

    start = time.monotonic()
    outcomes = run_all([lambda: 1, fails, never.wait], threads=3, timeout=0.3)
    assert time.monotonic() - start < 2
    assert outcomes[0] is None
    assert isinstance(outcomes[1], OSError)
    assert isinstance(outcomes[2], TimeoutError)
    never.set()
    assert run_all([], threads=3, timeout=1) == []


def test_run_all_starts_in_order_and_no_more_than_it_may_at_once():
    import threading

    running, most, order, lock = 0, 0, [], threading.Lock()

    def job(number):
        nonlocal running, most
        with lock:
            order.append(number)
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    assert run_all([lambda n=n: job(n) for n in range(12)], threads=3, timeout=10) == [None] * 12
    assert order == sorted(order)
    assert most == 3
