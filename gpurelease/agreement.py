"""What the ranks agree on: from all ranks' answers to one verdict, and from a bad verdict to one error on all ranks.

The ``on_...`` functions are pure and run on rank 0 only. Every answer has a "goal" (what its rank is doing), and may
have a "problem" (why it cannot). Every verdict has "failures", by rank: if there are any, every rank raises them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from gpurelease.errors import ReleaseFailed, TransitionFailed
from gpurelease.report import Transition
from gpurelease.rollcall import Answer, NotAllCame, RollCall, Verdict, ranks_text


class Agreement:
    """All ranks' way to one decision, during one transition.

    Args:
        roll_call: How the ranks talk.
        failure: What every rank raises if they cannot agree, or if one of them failed.
        timeout: Longest wait for other ranks at each roll call, in seconds.
        transition: Where the seconds are written down.
    """

    def __init__(
        self, roll_call: RollCall, failure: type[TransitionFailed], timeout: float, transition: Transition
    ) -> None:
        self._roll_call = roll_call
        self._failure = failure
        self._timeout = timeout
        self._transition = transition

    def reach(self, answer: Answer, conclude: Callable[[list[Answer]], Verdict], *, last: bool = False) -> Verdict:
        """Hold a roll call. All ranks must call.

        Args:
            answer: What this rank has to say.
            conclude: One of the ``on_...`` functions.
            last: Whether the program may end after it.

        Raises:
            ReleaseFailed, RestoreFailed: On all ranks that came: some did not, or told a problem, or differ.
        """
        aim = "release" if self._failure is ReleaseFailed else "restore"
        with self._transition.step("roll call"):
            try:
                verdict = self._roll_call.call(answer, conclude, self._timeout, last=last)
            except NotAllCame as absent:
                summary = f"The world could not be {aim}d: {absent.reason}."
                raise self._failure(summary, missing=absent.missing) from absent.__cause__
        if verdict["failures"]:
            failures = {int(rank): text for rank, text in verdict["failures"].items()}
            where = ranks_text(sorted(failures))
            raise self._failure(f"The world could not be {aim}d, for what happened on {where}:", failures)
        return verdict

    def confirm(
        self, goal: str, problems: list[str], freed_bytes: int | None = None, tolerated: Sequence[str] = ()
    ) -> str:
        """Tell the other ranks what went wrong here, and hear what went wrong there. All ranks must call.

        Args:
            goal: What should have been done, as the other ranks call it.
            problems: What went wrong on this rank.
            freed_bytes: Device bytes freed on this rank, or None without a device.
            tolerated: What went wrong on this rank, and may: all ranks go another way then.

        Returns:
            The first thing that is to be tolerated, on any rank, or the empty string.

        Raises:
            ReleaseFailed, RestoreFailed: On all ranks that came: something went wrong on one.
        """
        answer = {
            "goal": goal,
            "problem": "; ".join(problems),
            "tolerated": "; ".join(tolerated),
            "freed_bytes": freed_bytes,
        }
        verdict = self.reach(answer, on_outcome, last=goal == "restored")
        if freed_bytes is not None:
            self._transition.freed_bytes = freed_bytes
            self._transition.freed_bytes_over_ranks = tuple(verdict["freed_bytes"])
        return verdict["tolerated"]


def on_release(answers: list[Answer]) -> Verdict:
    """Decide which groups are released.

    Answers carry "strategy", "backends", "groups" (key -> [size of the group, whether it is connected, why it cannot
    be suspended]), "unmatched" (names in ``keep=`` that match nothing on that rank) and "contexts" (whether there is an
    ``also=``).

    Returns:
        "strategy": "rebuild" or "suspend".
        "strategy_reason": why, if it was left to us.
        "kept": key -> the ranks that would have released the group, where not all of its members would.
        "unconnected": keys of groups that some but not all members are connected in: nobody is connected again.
        "any": whether there is anything to release on any rank.
        "contexts": whether there is an ``also=`` on any rank, and so all must hear whether it was entered.
    """
    failures = failures_of(answers, "goal", "strategy", "backends")
    if failures:
        return {"failures": failures}
    for name in set(answers[0]["unmatched"]).intersection(*(answer["unmatched"] for answer in answers[1:])):
        failures.setdefault(0, f"keep={name!r} is neither name nor description of a process group on any rank")
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
    if strategy == "suspend":
        failures |= {rank: f"strategy='suspend' is not supported: {why_not}" for rank, why_not in unable.items()}
    elif strategy == "auto" and unable:
        strategy, reason = "rebuild", "rank {}: {}".format(*min(unable.items()))
    elif strategy == "auto":
        strategy, reason = "suspend", "all communicators can be suspended"
    return {
        "failures": failures,
        "strategy": strategy,
        "strategy_reason": reason,
        "kept": kept,
        "unconnected": [key for key, count in connected.items() if 0 < count < sizes[key]],
        "any": any(len(ranks) == sizes[key] for key, ranks in listed.items()),
        "contexts": any(answer["contexts"] for answer in answers),
    }


def on_restore(answers: list[Answer]) -> Verdict:
    """Decide which groups are restored: those that no member has destroyed meanwhile.

    Answers carry "destroyed" (keys of released groups that are gone on that rank), "doubted" (whether a body raised on
    it while Gloo stood in) and "context" (what an ``also=`` context raised when it was left).

    Returns:
        "destroyed": key -> the ranks that destroyed the group.
        "doubted": whether Gloo is in doubt on any rank.
        "contexts": by rank, what contexts have raised.
    """
    failures = failures_of(answers, "goal")
    if failures:
        return {"failures": failures}
    destroyed: dict[str, list[int]] = defaultdict(list)
    for rank, answer in enumerate(answers):
        for key in answer["destroyed"]:
            destroyed[key].append(rank)
    return {
        "failures": {},
        "destroyed": destroyed,
        "doubted": any(answer["doubted"] for answer in answers),
        "contexts": {rank: answer["context"] for rank, answer in enumerate(answers) if answer["context"]},
    }


def on_outcome(answers: list[Answer]) -> Verdict:
    """Decide whether a step went well everywhere. Answers carry "tolerated" and "freed_bytes", which may be None.

    Returns:
        "tolerated": what went wrong and may, on the first rank that tells of it.
        "freed_bytes": the least and the most of them, or None.
    """
    tolerated = (
        f"rank {rank}: {answer['tolerated']}" for rank, answer in enumerate(answers) if answer.get("tolerated")
    )
    freed = [answer["freed_bytes"] for answer in answers if answer.get("freed_bytes") is not None]
    return {
        "failures": failures_of(answers, "goal"),
        "tolerated": next(tolerated, ""),
        "freed_bytes": [min(freed), max(freed)] if freed else None,
    }


def failures_of(answers: list[Answer], *fields: str) -> dict[int, str]:
    """Return the problems that ranks have told, or else where they differ from most ranks in one of the fields."""
    problems = {rank: answer["problem"] for rank, answer in enumerate(answers) if answer.get("problem")}
    if problems:
        return problems
    for field in fields:
        values = [_hashable(answer.get(field)) for answer in answers]
        usual = Counter(values).most_common(1)[0][0]
        usual_ranks = ranks_text([rank for rank, value in enumerate(values) if value == usual])
        differing = {rank: value for rank, value in enumerate(values) if value != usual}
        if differing:
            return {
                rank: f"its {field} is {value!r}, and {usual!r} on {usual_ranks}" for rank, value in differing.items()
            }
    return {}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
