"""From all ranks' answers to one verdict, that says what every rank is to do. These functions are pure.

An answer says where its rank stands, and what it wants:

* "phase" ("armed" or "released") and "generation": the number of the roll call whose verdict brought it there;
* "wants": the phase that it wants the world in;
* "problem": why it cannot go there now, or what failed at the last step; "because of others": it broke that off;
* "step": what it has just done ("built"), or "contexts"; "step of": number of the verdict by which it did, or tried;
* "stand-in": what tells the Gloo that it has for WORLD from another, or "" if it needs none; "narrow": it has no room
  for a connection to every other rank.

Who wants the world released adds what it would release (see :func:`_from_armed`): all of that the first time, and after
that the number of the roll call in which it was the same. Fields that are as in :data:`USUAL` are left out. The verdict
says in "do" what comes next, for all ranks::

    ARMED      describe      say all of it, since it has changed on some ranks; then another roll call
               stand in      build a Gloo for WORLD; then another roll call
               release       put shells on the tables, end or suspend the backends; then another
    RELEASED   stand in      build another Gloo, since some rank doubts the one that it has
               end           end the suspended backends after all, since that failed somewhere
               restore       build and connect new backends, or resume the old ones; then another
               put on        put them on the tables
    apart      describe      say what was released; then another roll call
               follow        some are ARMED and some RELEASED, or at another generation: the former take off what the
                             latter have taken off, so that all can be restored together
    any        fail          nothing; all raise what is in "failures", by rank
               rest          nothing: all are in one state. Who wanted another one comes again

So a rank that was interrupted, late or away finds itself in the next verdict, whatever it missed.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from gpurelease.agreement.answers import USUAL, differences, numbers, of_some_only, one_stand_in, problems_of
from gpurelease.agreement.ballot import Answers, Verdict
from gpurelease.errors import nearest, ranks_text


def conclude(answers: Answers) -> Verdict:
    """Return what all ranks are to do.

    Args:
        answers: Of all ranks, in their order.

    Returns:
        The verdict; its other fields are said where it is made.
    """
    answers = [{**USUAL, **answer} for answer in answers]
    stands = {(answer["phase"], answer["generation"]) for answer in answers}
    if len(stands) > 1:
        return _from_apart(answers)
    [(phase, _)] = stands
    return _from_armed(answers) if phase == "armed" else _from_released(answers)


# ------------------------------------------------------------------------------------------------------------- apart


def _from_apart(answers: Answers) -> Verdict:
    """Have all ranks RELEASED, since what was released on one rank is of no use on another.

    Returns:
        "keys": what the ranks that are RELEASED have released.
        "backends": the ``backends=`` with which they did.
    """
    armed = [answer for answer in answers if answer["phase"] == "armed"]
    problems = problems_of(armed)
    if problems:
        return _failed(problems)
    released = [answer for answer in answers if answer["phase"] == "released"]
    if any(answer["groups"] is None for answer in released):
        return {"do": "describe"}
    keys = sorted({key for answer in released for key in answer["groups"]})
    return {"do": "follow", "keys": keys, "backends": released[0]["backends"] if released else None}


# ------------------------------------------------------------------------------------------------------------- armed


def _from_armed(answers: Answers) -> Verdict:
    """Decide which groups are released.

    Answers have "stand-in" and "contexts" (whether there is an ``also=``), and "strategy", "backends", "groups" (key ->
    [size of the group, whether it is connected, why it cannot be suspended]), "unmatched" (names in ``keep=`` that
    match nothing on that rank), "names" (those that they may stand for) and "world" (the key of WORLD, if it is one of
    the groups). If all that is as it was when it was decided on before, they have the number of that roll call in "as
    in" instead.

    Returns:
        "as in": that number, if it is the same on all ranks, instead of the next four.
        "strategy": "rebuild" or "suspend".
        "strategy reason": why, if it was left to us.
        "kept": key -> the ranks that would have released the group, where not all of its members would.
        "unconnected": keys of groups that some but not all members are connected in: nobody is connected again.
        "contexts": whether any rank has an ``also=``, so that all must hear whether it was entered.
        "nothing": whether there is nothing to release on any rank.
    """
    problems = problems_of(answers)
    if problems:
        return _failed(problems)
    if any(answer["wants"] == "armed" for answer in answers):
        return {"do": "rest", "last": True}
    contexts = any(answer["contexts"] for answer in answers)
    if any(answer["as in"] is not None for answer in answers):
        if len(known := {answer["as in"] for answer in answers}) > 1:
            return {"do": "describe"}
        if not one_stand_in(answers):
            return _stand_in(answers)
        return {"do": "release", "as in": known.pop(), "contexts": contexts}
    differing = differences(answers, "strategy", "backends") or _unmatched(answers)
    if differing:
        return _failed(differing)
    listed: dict[str, list[int]] = defaultdict(list)
    connected: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for rank, answer in enumerate(answers):
        for key, (size, is_connected, _) in answer["groups"].items():
            listed[key].append(rank)
            connected[key] += is_connected
            sizes[key] = size
    kept = {key: ranks for key, ranks in listed.items() if len(ranks) < sizes[key]}
    # By rank, why the first of its groups that cannot be suspended cannot.
    unable: dict[int, str] = {}
    for rank, answer in enumerate(answers):
        for key, (_, _, why_not) in answer["groups"].items():
            if why_not and key not in kept:
                unable.setdefault(rank, why_not)
    strategy, reason = answers[0]["strategy"], ""
    if strategy == "suspend" and unable:
        return _failed({rank: f"strategy='suspend' is not supported: {why_not}" for rank, why_not in unable.items()})
    if strategy == "auto" and unable:
        strategy, reason = "rebuild", "rank {}: {}".format(*min(unable.items()))
    elif strategy == "auto":
        strategy, reason = "suspend", "all communicators can be suspended"
    decided = {
        "strategy": strategy,
        "strategy reason": reason,
        "kept": kept,
        "unconnected": [key for key, count in connected.items() if 0 < count < sizes[key]],
        "contexts": contexts,
    }
    if len(kept) == len(listed):
        return {"do": "rest", "nothing": True, "last": True, **decided}
    world = answers[0]["world"]
    if world in listed and world not in kept and not one_stand_in(answers):
        return _stand_in(answers)
    return {"do": "release", **decided}


# ---------------------------------------------------------------------------------------------------------- released


def _from_released(answers: Answers) -> Verdict:
    """Decide whether all stay RELEASED, or go on to ARMED.

    Answers have "stand-in", "held by" (the strategy that holds what was released), "context" (what an ``also=``
    context raised), "freed" (device bytes, or None), "worked" (seconds), "unsuspended" (what failed in suspending),
    "gone" (keys of released groups that were destroyed on that rank), "in turn" (whether one of the others must be
    built while no other group is) and "doubts" (whether a collective may have been left in its middle on Gloo).

    Returns:
        "because": by rank, what failed in the release that is undone here.
        "freed", "worked": the least, the mean and the most of it over all ranks, or None.
        "gone": key -> the ranks that destroyed the group.
        "in turn": whether all groups are built one after the other, on all ranks.
        "doubts": whether any rank has them.
        "contexts": whether any rank has an ``also=``.
        "contexts failed": by rank, what contexts have raised when they were left.
        "contexts refused": why contexts that were entered must be left again, before anything is restored.
        "reason": why suspended backends are ended.
    """
    problems = problems_of(answers)
    if len({answer["held by"] for answer in answers}) > 1:
        return {"do": "end", "reason": "some ranks have ended what others have suspended"}
    if all(answer["wants"] == "released" for answer in answers):
        broken = {rank: answer["context"] for rank, answer in enumerate(answers) if answer["context"]}
        if broken:
            return _failed(broken)
        if problems:
            return _restore(answers, because=problems)
        unsuspended = [f"rank {rank}: {a['unsuspended']}" for rank, a in enumerate(answers) if a["unsuspended"]]
        if unsuspended:
            return {"do": "end", "reason": unsuspended[0]}
        if not one_stand_in(answers):
            return _stand_in(answers)
        return {"do": "rest", **numbers(answers), "contexts": any(answer["contexts"] for answer in answers)}
    if any(answer["step"] == "contexts" for answer in answers):
        wants = ranks_text([rank for rank, answer in enumerate(answers) if answer["wants"] == "armed"])
        return {"do": "rest", "contexts refused": f"{wants} wants the world restored"}
    if problems and not of_some_only(answers):
        return _failed(problems)
    if problems and answers[0]["held by"] == "suspend":
        return {"do": "end", "reason": "some ranks were not there when others resumed"}
    built = {answer["step of"] if answer["step"] == "built" else None for answer in answers}
    if built == {None} or len(built) > 1:
        return _restore(answers)
    return {
        "do": "put on",
        "last": True,
        **numbers(answers),
        "doubts": any(answer["doubts"] for answer in answers),
        "contexts failed": {rank: answer["context"] for rank, answer in enumerate(answers) if answer["context"]},
    }


def _restore(answers: Answers, because: dict[int, str] | None = None) -> Verdict:
    gone: dict[str, list[int]] = defaultdict(list)
    for rank, answer in enumerate(answers):
        for key in answer["gone"]:
            gone[key].append(rank)
    in_turn = any(answer["in turn"] for answer in answers)
    return {"do": "restore", "gone": gone, "in turn": in_turn, "because": because or {}}


# --------------------------------------------------------------------------------------------------------------- all


def _failed(failures: dict[int, str]) -> Verdict:
    return {"do": "fail", "failures": failures, "last": True}


def _unmatched(answers: Answers) -> dict[int, str]:
    """Return, for rank 0, a name in ``keep=`` that is no group's on any rank."""
    for name in set(answers[0]["unmatched"]).intersection(*(answer["unmatched"] for answer in answers[1:])):
        there_are = nearest([name], sorted({each for answer in answers for each in answer["names"]}))
        names = f"; there {'is' if len(there_are) == 1 else 'are'} {', '.join(map(repr, there_are))}"
        return {0: f"keep={name!r} is neither name nor description of a process group on any rank{names}"}
    return {}


def _stand_in(answers: Answers) -> Verdict:
    """Returns "lazily": whether two ranks connect only when they talk, since not all have room for all connections."""
    return {"do": "stand in", "lazily": any(answer["narrow"] for answer in answers)}
