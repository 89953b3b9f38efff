"""What answers have in common, and where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from gpurelease.agreement.ballot import Answer, Answers, Verdict
from gpurelease.errors import ranks_text

USUAL: Answer = {
    "problem": "",
    "because of others": False,
    "step": "",
    "step of": 0,
    "narrow": False,
    "backends": None,
    "groups": None,
    "unmatched": [],
    "names": [],
    "as in": None,
    "held by": "rebuild",
    "contexts": False,
    "context": "",
    "freed": None,
    "worked": None,
    "unsuspended": "",
    "gone": [],
    "in turn": False,
    "doubts": False,
}


def without_usual(answer: Answer) -> Answer:
    """Return an answer without what goes without saying."""
    return {field: value for field, value in answer.items() if field not in USUAL or USUAL[field] != value}


def problems_of(answers: Iterable[Answer]) -> dict[int, str]:
    """Return the problems that ranks have; of those that broke something off for others' only if there are no
    others."""
    told = {answer["rank"]: answer for answer in answers if answer["problem"]}
    own = {rank: answer["problem"] for rank, answer in told.items() if not answer["because of others"]}
    return own or {rank: answer["problem"] for rank, answer in told.items()}


def of_some_only(answers: Answers) -> bool:
    """Return whether all problems are of steps that some ranks were not in: they gave up, and have come again."""
    steps = {answer["step of"] for answer in answers}
    return len(steps) > 1 and all(answer["step of"] for answer in answers if answer["problem"])


def differences(answers: Answers, *fields: str) -> dict[int, str]:
    """Return where ranks differ from most ranks in one of the fields."""
    for field in fields:
        values = [_hashable(answer[field]) for answer in answers]
        usual = Counter(values).most_common(1)[0][0]
        usual_ranks = ranks_text([rank for rank, value in enumerate(values) if value == usual])
        differing = {rank: value for rank, value in enumerate(values) if value != usual}
        if differing:
            return {
                rank: f"its {field} is {value!r}, and {usual!r} on {usual_ranks}" for rank, value in differing.items()
            }
    return {}


def one_stand_in(answers: Answers) -> bool:
    """Return whether all ranks have the same Gloo for WORLD, or need none."""
    return len({answer["stand-in"] for answer in answers}) == 1 and answers[0]["stand-in"] != "none"


def numbers(answers: Answers) -> Verdict:
    """Return the least, the mean and the most of what ranks have freed, and of how long they have worked."""
    return {"freed": _spread(answers, "freed"), "worked": _spread(answers, "worked")}


def _spread(answers: Answers, field: str) -> list[float] | None:
    told = [answer[field] for answer in answers if answer[field] is not None]
    return [min(told), sum(told) / len(told), max(told)] if told else None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
