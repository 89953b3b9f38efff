"""One roll call: its keys in the store, and what a rank does with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease.agreement.waiting import NotAllCame, value_within
from gpurelease.errors import ranks_text

Answer = dict[str, Any]
Answers = list[Answer]  # of all ranks, in their order
Verdict = dict[str, Any]
Conclude = Callable[[Answers], Verdict]

# Seconds that the first of those whose time is up has, to give up for all of them.
GIVING_UP_WITHIN = 1.0
# Seconds that rank 0, which usually hosts the store, waits at most for the others to have read the last verdict.
READ_WITHIN = 2.0
READ_WITHIN_OF_LEAVING = 0.3

ALWAYS, SELDOM = ("answers", "count", "verdict", "read", "all-read"), ("giving-up", "steps", "trouble")


class Ballot:
    """One roll call, on one rank.

    Args:
        client: A client of WORLD's store, for us alone.
        token: What all keys of this WORLD begin with.
        number: Number of the roll call.
        rank: This process's rank in WORLD.
        size: Number of ranks.
    """

    def __init__(self, client: Store, token: str, number: int, rank: int, size: int) -> None:
        self.number = number
        self._client = client
        self._room = PrefixStore(f"gpurelease/{token}", client)
        self._rank = rank
        self._size = size

    @property
    def has_begun(self) -> bool:
        """Whether any rank has come."""
        return self._room.check([self._key("count")])

    @property
    def is_over(self) -> bool:
        """Whether there is a verdict."""
        return self._room.check([self._key("verdict")])

    def answer(self, answer: Answer, *, again: bool) -> bool:
        """Say what this rank has to say, and return whether it is the last.

        Args:
            answer: It must survive JSON.
            again: Whether this rank may have been counted already. Its last answer is what counts.
        """
        record = json.dumps({"rank": self._rank, **answer})
        self._room.append(self._key("answers"), record + "\n")  # type: ignore[attr-defined]
        return not again and self._room.add(self._key("count"), 1) >= self._size

    def verdict_within(self, timeout: float) -> Verdict | None:
        """Wait for the verdict in the server; None if it has not come in time."""
        written = value_within(self._client, self._room, self._key("verdict"), timeout)
        return None if written is None else json.loads(written)

    def conclude(
        self, conclude: Conclude, time_is_up_after: float | None = None, told: NotAllCame | None = None
    ) -> tuple[Verdict | None, Answers]:
        """Make a verdict of the answers that are there.

        Args:
            conclude: Makes it, if all are.
            time_is_up_after: The seconds that were waited for the others, if some may not be there.
            told: Who is known to be missing and why, if that is known.

        Returns:
            The verdict that counts, or None if it is too early for one; and all answers, or none.
        """
        answers = self._answers()
        missing = self._missing(answers)
        if missing and time_is_up_after is None:
            return None, []  # a rank was counted twice, when the store had not answered it
        if missing:
            who = f"no word from {ranks_text(missing)} within {time_is_up_after:g} s"
            reason = f"{who} (rank {self._rank} was the first to stop waiting)"
            blamed, reason = (missing, reason) if told is None else (list(told.missing), told.reason)
            return self.propose(given_up(blamed, reason, absent=missing)), []
        everybody = [answers[rank] for rank in range(self._size)]
        try:
            verdict = conclude(everybody)
        except Exception as error:
            reason = f"rank {self._rank} failed to conclude the roll call: {error!r}"
            verdict = given_up([self._rank], reason, broken=True)
        return self.propose(verdict), everybody

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return self._missing(self._answers())

    def _missing(self, answers: dict[int, Answer]) -> list[int]:
        return [rank for rank in range(self._size) if rank not in answers]

    def _answers(self) -> dict[int, Answer]:
        lines = self._room.get(self._key("answers")).decode().splitlines()
        return {record["rank"]: record for record in json.loads(f"[{','.join(lines)}]")}

    def give_up(self, conclude: Conclude, timeout: float, told: NotAllCame | None) -> tuple[Verdict, Answers]:
        """Conclude, since the time is up; but one rank is enough to do so for all."""
        if self._room.add(self._key("giving-up"), 1) > 1:
            verdict = self.verdict_within(GIVING_UP_WITHIN)
            if verdict is not None:
                return verdict, []
        verdict, answers = self.conclude(conclude, timeout, told)
        assert verdict is not None
        return verdict, answers

    def propose(self, verdict: Verdict) -> Verdict:
        """Write the verdict, unless there is one, and return the one that counts."""
        counts: Verdict = json.loads(self._room.compare_set(self._key("verdict"), "", json.dumps(verdict)))
        return counts

    def have_read(self, verdict: Verdict) -> None:
        """Say that this rank has read a verdict after which a program may end; rank 0 waits for all to have said so.

        If rank 0, which usually hosts the store, ended at once, the others would be told of a lost store.
        """
        awaited = self._size - len(verdict.get("absent", ()))
        if self._room.add(self._key("read"), 1) == awaited:
            self._room.set(self._key("all-read"), "")
        elif self._rank == 0:
            # Of a rank that left, the others hear when they come: some may not have come yet.
            limit = READ_WITHIN_OF_LEAVING if "left" in verdict else READ_WITHIN
            value_within(self._client, self._room, self._key("all-read"), limit)

    def delete(self, *, seldom: bool) -> None:
        """Delete the keys, once all have come to a later roll call; with those that are seldom used."""
        for kind in ALWAYS + SELDOM if seldom else ALWAYS:
            self._room.delete_key(self._key(kind))

    def _key(self, kind: str) -> str:
        return f"{kind}/{self.number}"


def given_up(missing: list[int], reason: str, **more: Any) -> Verdict:
    """Return the verdict that nothing is decided, for want of some ranks.

    Args:
        missing: The ranks.
        reason: One sentence.
        **more: "absent": all ranks that had not come, if that is why; "left": the rank broke off the roll call;
            "broken": it failed to conclude it.
    """
    return {"missing": missing, "reason": reason, "last": True, **more}
