"""What the ranks agree on, from literal answers."""

from __future__ import annotations

from gpurelease.agreement import failures_of, on_outcome, on_release, on_restore
from gpurelease.rollcall import ranks_text


def release(groups=None, **more):
    answer = {"goal": "release", "problem": "", "strategy": "rebuild", "backends": None, "groups": groups or {}}
    return answer | {"unmatched": [], "contexts": False} | more


def test_a_group_is_released_if_all_its_members_would():
    verdict = on_release([release({"w": [3, 1, ""], "a": [2, 1, ""]})] * 2 + [release({"w": [3, 1, ""]})])
    assert verdict == {
        "failures": {},
        "strategy": "rebuild",
        "strategy_reason": "",
        "kept": {},
        "unconnected": [],
        "any": True,
        "contexts": False,
    }


def test_a_group_that_one_member_keeps_is_kept_by_all():
    verdict = on_release([release({"w": [2, 1, ""], "a": [2, 1, ""]}), release({"w": [2, 1, ""]})])
    assert verdict["kept"] == {"a": [0]}
    assert verdict["any"]


def test_a_group_shared_with_another_world_is_kept():
    """Its size is more than the ranks of this world that list it: the others are another job's."""
    verdict = on_release([release({"shared": [4, 1, ""]}), release({"shared": [4, 1, ""]})])
    assert verdict["kept"] == {"shared": [0, 1]}
    assert not verdict["any"]


def test_only_groups_that_all_members_are_connected_in_are_connected_again():
    verdict = on_release(
        [
            release({"all": [2, 1, ""], "one": [2, 1, ""], "none": [2, 0, ""]}),
            release({"all": [2, 1, ""], "one": [2, 0, ""], "none": [2, 0, ""]}),
        ]
    )
    assert verdict["unconnected"] == ["one"]


def test_a_name_to_keep_must_exist_on_some_rank():
    assert on_release([release(unmatched=["tp", "pp"]), release(unmatched=["pp"])])["failures"] == {
        0: "keep='pp' is neither name nor description of a process group on any rank"
    }


def test_ranks_that_differ_are_named_with_what_they_differ_in():
    answers = [
        release(),
        release(),
        release(backends=["nccl"]),
        {"goal": "restore", "destroyed": [], "doubted": False},
    ]
    assert on_release(answers)["failures"] == {3: "its goal is 'restore', and 'release' on ranks 0, 1 and 2"}
    assert on_release(answers[:3])["failures"] == {2: "its backends is ('nccl',), and None on ranks 0 and 1"}
    assert on_release([release(), release(strategy="suspend"), release()])["failures"] == {
        1: "its strategy is 'suspend', and 'rebuild' on ranks 0 and 2"
    }


def test_a_problem_of_one_rank_is_everyone_s():
    answers = [release(), release(problem="a coalescing block is open"), {"goal": "restore"}]
    assert on_release(answers)["failures"] == {1: "a coalescing block is open"}
    assert failures_of(answers) == {1: "a coalescing block is open"}


def test_suspending_is_refused_with_the_reasons_of_the_ranks_that_cannot():
    able, unable = {"a": [3, 1, ""]}, {"a": [3, 1, "no"]}
    verdict = on_release([release(each, strategy="suspend") for each in (able, unable, unable)])
    assert verdict["failures"] == dict.fromkeys((1, 2), "strategy='suspend' is not supported: no")


def test_auto_suspends_if_all_ranks_can_and_says_why_it_does_not():
    able, unable = {"a": [2, 1, ""]}, {"a": [2, 1, "no"]}
    for groups, expected in [
        ([able, able], ("suspend", "all communicators can be suspended")),
        ([able, unable], ("rebuild", "rank 1: no")),
        # Only what is released counts: the second rank keeps the group.
        ([unable, {}], ("suspend", "all communicators can be suspended")),
    ]:
        verdict = on_release([release(each, strategy="auto") for each in groups])
        assert (verdict["strategy"], verdict["strategy_reason"]) == expected
        assert verdict["failures"] == {}


def test_what_may_go_wrong_is_told_by_the_first_rank_that_has_it():
    answers = [{"goal": "released", "tolerated": text} for text in ("", "this", "that")]
    assert on_outcome(answers) == {"failures": {}, "tolerated": "rank 1: this", "freed_bytes": None}


def test_groups_destroyed_on_some_ranks_are_named_with_the_ranks():
    answers = [
        {"goal": "restore", "destroyed": ["a"], "doubted": False, "context": ""},
        {"goal": "restore", "destroyed": [], "doubted": True, "context": "OSError()"},
    ]
    assert on_restore(answers) == {
        "failures": {},
        "destroyed": {"a": [0]},
        "doubted": True,
        "contexts": {1: "OSError()"},
    }


def test_freed_bytes_over_the_ranks():
    answers = [{"goal": "released", "freed_bytes": size} for size in (5, None, 9)]
    assert on_outcome(answers) == {"failures": {}, "tolerated": "", "freed_bytes": [5, 9]}
    assert on_outcome([{"goal": "released", "freed_bytes": None}])["freed_bytes"] is None


def test_ranks_text():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 2, 5]) == "ranks 0, 2 and 5"
    assert ranks_text(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
