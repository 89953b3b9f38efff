"""What reports and errors say."""

from __future__ import annotations

import pickle
import time

import pytest

from gpurelease import ReleaseFailed, RestoreFailed
from gpurelease.errors import ContextFailed, group_text, nearest, ranks_text
from gpurelease.report import GroupReport, Memory, Report, Transition


def test_a_report_says_it_in_one_line():
    memory = Memory(80 * 2**30, 10 * 2**30, 20 * 2**30, 3 * 2**30)
    released = Transition("release", 18, {"roll call": 0.01, "tear down": 0.04}, memory)
    assert str(released) == (
        "released 18 process groups in 0.050 s (roll call 0.010, tear down 0.040), freed 7.00 GiB of device memory, "
        "and emptied torch's cache of 3.00 GiB"
    )
    released.freed_bytes_over_ranks = (6 * 2**30, 6.5 * 2**30, 8 * 2**30)
    released.working_seconds_over_ranks = (0.01, 0.02, 0.04)
    assert str(released) == (
        "released 18 process groups in 0.050 s (roll call 0.010, tear down 0.040; without waiting 0.010 to 0.040 over "
        "the ranks, 0.020 in the mean), freed 7.00 GiB of device memory (6.00 GiB to 8.00 GiB over the ranks, 6.50 GiB "
        "in the mean), and emptied torch's cache of 3.00 GiB"
    )
    memory = Memory(80 * 2**30, 20 * 2**30, 19 * 2**30, 0)
    restored = Transition("restore", 1, {"build": 0.5}, memory, (-(2**31), -1.5 * 2**30, -(2**30)))
    assert str(restored) == (
        "restored 1 process group in 0.500 s (build 0.500), took 1.00 GiB of device memory "
        "(1.00 GiB to 2.00 GiB over the ranks, 1.50 GiB in the mean)"
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


def test_a_group_without_a_description_is_named_by_its_members():
    assert group_text("3", "tp", (0, 1)) == "process group '3' (tp)"
    assert group_text("3", "undefined", range(8)) == "process group '3' (ranks 0 to 7)"
    assert group_text("3", "", ()) == "process group '3'"
    assert str(GroupReport("3", "undefined", (1, 5), "cuda:nccl", True)) == "process group '3' (ranks 1 and 5)"


def test_names_are_those_that_look_most_like_the_mistaken_one():
    names = [*map(str, range(100)), "weight_sync", "tp", "pp"]
    assert nearest(["weigth_sync"], names)[0] == "weight_sync"
    assert len(nearest(["weigth_sync"], names)) == 12
    assert nearest([], names) == []


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
