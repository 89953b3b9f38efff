"""What the ranks are to do, from literal answers."""

from __future__ import annotations

import pytest

from gpurelease.agreement.verdicts import conclude


def answer(**more):
    """What a rank says that is ARMED and wants the world released, and has no group."""
    return {
        "phase": "armed",
        "generation": 0,
        "wants": "released",
        "problem": "",
        "because of others": False,
        "step": "",
        "step of": 0,
        "strategy": "rebuild",
        "backends": None,
        "groups": {},
        "unmatched": [],
        "world": "",
        "stand-in": "none",
        "held by": "rebuild",
        "contexts": False,
        "context": "",
        "freed": None,
        "unsuspended": "",
        "gone": [],
        "in turn": False,
        "doubts": False,
    } | more


def verdict(*answers):
    return conclude([{"rank": rank, **each} for rank, each in enumerate(answers)])


def released(**more):
    return answer(**{"phase": "released", "generation": 5, "stand-in": "", **more})


def built(**more):
    return released(wants="armed", step="built", **{"step of": 7, **more})


# -------------------------------------------------------------------------------------------------------------- ARMED


def as_in(number, **more):
    return {"phase": "armed", "generation": 0, "wants": "released", "as in": number, "stand-in": "one", **more}


def test_what_has_not_changed_is_decided_as_before():
    assert verdict(as_in(7), as_in(7, contexts=True)) == {"do": "release", "as in": 7, "contexts": True}
    assert verdict(as_in(7), as_in(7, **{"stand-in": "none"})) == {"do": "stand in", "lazily": False}
    assert verdict(as_in(7, narrow=True), as_in(7, **{"stand-in": "none"})) == {"do": "stand in", "lazily": True}
    assert verdict(as_in(7), as_in(7, problem="no"))["failures"] == {1: "no"}


@pytest.mark.parametrize("other", [as_in(8), answer(groups={"w": [2, 1, ""]})])
def test_if_one_rank_has_something_new_to_say_all_say_everything(other):
    assert verdict(as_in(7), other) == verdict(other, as_in(7)) == {"do": "describe"}


def test_a_group_is_released_if_all_its_members_would():
    groups = {"w": [3, 1, ""], "a": [2, 1, ""]}
    assert verdict(answer(groups=groups), answer(groups=groups), answer(groups={"w": [3, 1, ""]})) == {
        "do": "release",
        "strategy": "rebuild",
        "strategy reason": "",
        "kept": {},
        "unconnected": [],
        "contexts": False,
    }


def test_a_group_that_one_member_keeps_is_kept_by_all():
    found = verdict(answer(groups={"w": [2, 1, ""], "a": [2, 1, ""]}), answer(groups={"w": [2, 1, ""]}))
    assert (found["do"], found["kept"]) == ("release", {"a": [0]})


def test_a_group_shared_with_another_world_is_kept():
    """Its size is more than the ranks of this world that list it: the others are another job's."""
    found = verdict(*[answer(groups={"shared": [4, 1, ""]})] * 2)
    assert (found["do"], found["nothing"], found["kept"]) == ("rest", True, {"shared": [0, 1]})


def test_only_groups_that_all_members_are_connected_in_are_connected_again():
    found = verdict(
        answer(groups={"all": [2, 1, ""], "one": [2, 1, ""], "none": [2, 0, ""]}),
        answer(groups={"all": [2, 1, ""], "one": [2, 0, ""], "none": [2, 0, ""]}),
    )
    assert found["unconnected"] == ["one"]


def test_world_is_released_once_all_ranks_have_one_gloo_for_it():
    def found(*stand_ins, world="w", groups=("w",)):
        listed = {key: [len(stand_ins), 1, ""] for key in groups}
        return verdict(*(answer(groups=listed, world=world, **{"stand-in": each}) for each in stand_ins))["do"]

    assert found("none", "none") == found("old", "none") == found("old", "older") == "stand in"
    assert found("old", "old") == "release"
    assert found("none", "none", world="", groups=("a",)) == "release", "WORLD is kept"


def test_a_name_to_keep_must_exist_on_some_rank():
    mine = answer(unmatched=["tp", "pp"], names=["cp", "dp"])
    assert verdict(mine, answer(unmatched=["pp"], names=["dp", "epp"])) == {
        "do": "fail",
        "failures": {
            0: "keep='pp' is neither name nor description of a process group on any rank; there are 'epp', 'dp', 'cp'"
        },
        "last": True,
    }


def test_ranks_that_differ_are_named_with_what_they_differ_in():
    for more, text in [
        ({"backends": ["nccl"]}, "its backends is ('nccl',), and None on ranks 0 and 2"),
        ({"strategy": "suspend"}, "its strategy is 'suspend', and 'rebuild' on ranks 0 and 2"),
    ]:
        assert verdict(answer(), answer(**more), answer())["failures"] == {1: text}


def test_a_problem_of_one_rank_is_everyone_s():
    found = verdict(answer(), answer(problem="a coalescing block is open"), answer(wants="armed"))
    assert (found["do"], found["failures"]) == ("fail", {1: "a coalescing block is open"})


def test_what_was_broken_off_for_another_s_failure_is_no_failure_of_its_own():
    broken_off = {"problem": "broken off", "because of others": True}
    assert verdict(answer(**broken_off), answer(problem="it failed"))["failures"] == {1: "it failed"}
    assert verdict(answer(**broken_off), answer(**broken_off))["failures"] == {0: "broken off", 1: "broken off"}


def test_suspending_is_refused_with_the_reasons_of_the_ranks_that_cannot():
    able, unable = {"a": [3, 1, ""]}, {"a": [3, 1, "no"]}
    found = verdict(*(answer(groups=each, strategy="suspend") for each in (able, unable, unable)))
    assert found["failures"] == dict.fromkeys((1, 2), "strategy='suspend' is not supported: no")


def test_auto_suspends_if_all_ranks_can_and_says_why_it_does_not():
    able, unable = {"a": [2, 1, ""]}, {"a": [2, 1, "no"], "b": [1, 1, ""]}
    for groups, expected in [
        ([able, able], ("suspend", "all communicators can be suspended")),
        ([able, unable], ("rebuild", "rank 1: no")),
        # Only what is released counts: the first rank keeps the group.
        ([{}, unable], ("suspend", "all communicators can be suspended")),
    ]:
        found = verdict(*(answer(groups=each, strategy="auto") for each in groups))
        assert (found["strategy"], found["strategy reason"]) == expected


# ------------------------------------------------------------------------------------------------------------ RELEASED


def test_all_stay_released_if_all_went_well_and_want_that():
    found = verdict(released(freed=5), released(contexts=True), released(freed=9))
    assert found == {"do": "rest", "freed": [5, 7, 9], "worked": None, "contexts": True}


def test_a_release_that_failed_on_one_rank_is_undone_on_all():
    found = verdict(released(), released(problem="it failed"))
    assert (found["do"], found["because"]) == ("restore", {1: "it failed"})


def test_contexts_that_failed_are_told_before_anything_is_undone():
    found = verdict(released(), released(context="also= raised OSError()"))
    assert (found["do"], found["failures"]) == ("fail", {1: "also= raised OSError()"})


def test_what_could_not_be_suspended_on_one_rank_is_ended_on_all():
    found = verdict(*(released(unsuspended=text) for text in ("", "this", "that")))
    assert found == {"do": "end", "reason": "rank 1: this"}
    held = verdict(released(**{"held by": "suspend"}), released(wants="armed"))
    assert held == {"do": "end", "reason": "some ranks have ended what others have suspended"}


def test_ranks_that_are_apart_say_what_was_released():
    assert verdict(answer(), released(groups=None))["do"] == "describe"
    assert verdict(answer(), released(groups={"a": [2, 1, ""]}))["keys"] == ["a"]


def test_a_gloo_that_one_rank_doubts_is_built_anew_by_all():
    assert verdict(*(released(**{"stand-in": each}) for each in ("old", "none")))["do"] == "stand in"
    assert verdict(*[released(**{"stand-in": "old"})] * 2)["do"] == "rest"


@pytest.mark.parametrize("others", [released(), released(wants="armed")])
def test_if_one_rank_wants_to_go_back_all_do(others):
    """Whoever wants it released comes again afterwards."""
    found = verdict(others, released(wants="armed", gone=["a"]))
    assert found == {"do": "restore", "gone": {"a": [1]}, "in turn": False, "because": {}}


def test_if_one_rank_cannot_build_side_by_side_none_does():
    found = verdict(*(released(wants="armed", **{"in turn": rank == 2}) for rank in range(4)))
    assert (found["do"], found["in turn"]) == ("restore", True)


def test_nobody_puts_on_what_not_all_have_built_together():
    assert verdict(built(worked=0.5), built(freed=-3, worked=1.5)) == {
        "do": "put on",
        "last": True,
        "freed": [-3, -3, -3],
        "worked": [0.5, 1.0, 1.5],
        "doubts": False,
        "contexts failed": {},
    }
    assert verdict(built(doubts=True), built(context="OSError()"))["contexts failed"] == {1: "OSError()"}
    assert verdict(built(doubts=True), built())["doubts"]
    for other in (released(wants="armed"), built(**{"step of": 6}), released()):
        assert verdict(built(), other)["do"] == "restore", "somebody has come only now, or has built with others"
    assert verdict(built(), released(wants="armed", problem="no memory"))["failures"] == {1: "no memory"}


@pytest.mark.parametrize("here", [released(), released(wants="armed")])
def test_who_has_failed_for_want_of_others_that_have_given_up_tries_again_with_them(here):
    alone = released(wants="armed", problem="not done in time", **{"step of": 7})
    assert verdict(alone, here)["do"] == "restore"
    assert verdict(alone, here | {"problem": "no threads"})["do"] == "fail", "it has come with that"
    assert verdict(alone, built())["failures"] == {0: "not done in time"}
    suspended = {"held by": "suspend"}
    assert verdict(alone | suspended, here | suspended)["do"] == "end"


# --------------------------------------------------------------------------------------------------------------- apart


def test_ranks_that_are_apart_are_brought_together():
    there = released(groups={"a": [2, 1, ""]}, backends=["nccl"])
    for armed in (answer(), answer(wants="armed"), answer(generation=9)):
        assert verdict(armed, there) == {"do": "follow", "keys": ["a"], "backends": ["nccl"]}
    assert verdict(there, built(generation=4, groups={"b": [1, 1, ""]}))["keys"] == ["a", "b"]
    assert verdict(answer(), answer(generation=9)) == {"do": "follow", "keys": [], "backends": None}
    assert verdict(answer(problem="a capture"), there)["failures"] == {0: "a capture"}
    assert verdict(answer(), released(problem="only here"))["do"] == "follow", "it can still be brought back"


def test_all_rest_where_one_wants_no_more_than_what_is():
    assert verdict(answer(groups={"a": [2, 1, ""]}), answer(wants="armed")) == {"do": "rest", "last": True}


def test_contexts_that_were_entered_are_left_before_anything_is_restored_for_another_rank():
    found = verdict(released(step="contexts"), released(wants="armed"), released(step="contexts"))
    assert found == {"do": "rest", "contexts refused": "rank 1 wants the world restored"}
