"""The roll call: all ranks say where they stand, and all of them read the same verdict.

It runs over WORLD's own store and not over a collective, for three reasons. A store names the ranks that did not
come. A time-out breaks nothing, while a Gloo collective that times out closes its connections for good. And the
verdict is decided once and for all: it is a key that ``compare_set`` lets one rank write, so a rank that gives up
and a rank that concludes at the same instant still read one outcome. Rank 0 collects the answers and concludes: n
requests to the store in all, where n ranks reading each other's answers would make n squared.

Old keys never answer. A store may outlive a world (torchrun's agent store does; pytorch 74666 and 114585 show what
stale keys do), so every rank is handed a fresh token, that all further keys begin with, under a key that only it can
know. Keys are deleted as soon as nobody can read them any more, so their number does not grow.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease import torch_internals

Answer = dict[str, Any]
Verdict = dict[str, Any]


class NotAllCame(Exception):
    """Some ranks did not come to a roll call in time, or left before it.

    Attributes:
        missing: Their global ranks.
        reason: One sentence.
    """

    def __init__(self, missing: Sequence[int], reason: str) -> None:
        self.missing = tuple(missing)
        self.reason = reason
        super().__init__(reason)


class RollCall:
    """The roll calls of one WORLD, as one rank takes part in them. One thread at a time may call.

    Args:
        store: WORLD's store. A clone is used, with a connection of its own where the store has connections: a wait
            here must not hold up a communicator that uses the store at the same time.
        rank: This process's global rank.
        size: Number of ranks.

    Attributes:
        token: Fresh for every WORLD and the same on all its ranks, once the first roll call went through.
        number: How many roll calls there were: the same on all ranks that came to the last one.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._hall = PrefixStore("gpurelease", _clone(store))
        self._rank = rank
        self._size = size
        self.number = 0
        self._read: list[str] = []  # rank 0: keys that nobody needs, once all have come to a later roll call
        # Rank 0: the words it has handed the token out for, by rank, until all ranks came once.
        self._words: dict[int, bytes] | None = {}
        # A waiting rank asks again after a twentieth of the time it has waited, at most this many seconds: four
        # ranks lose 20 ms at the most, and a thousand ranks ask the store 4,000 times a second at the most.
        self._longest_pause = max(0.02, size / 4000)
        self.token = ""
        if rank == 0:
            self._enter_room(uuid.uuid4().hex[:12])

    def call(
        self, answer: Answer, conclude: Callable[[list[Answer]], Verdict], timeout: float, *, last: bool = False
    ) -> Verdict:
        """Answer, and wait for the verdict on all ranks' answers. All ranks must call.

        Args:
            answer: What this rank has to say; must survive JSON.
            conclude: Makes the verdict of all answers, in order of ranks. It runs on rank 0 only.
            timeout: Longest wait, in seconds.
            last: Whether this process may end after it.

        Returns:
            The verdict, the same on all ranks.

        Raises:
            NotAllCame: On every rank that came, with the same ranks named.
        """
        try:
            verdict = self._call(answer, conclude, _Clock(timeout, self._longest_pause), last)
        except RuntimeError as error:  # torch's DistError and its kin
            raise NotAllCame(
                (), f"WORLD's store does not answer; its host, usually rank 0, may be gone ({error})"
            ) from error
        if "missing" in verdict:
            raise NotAllCame(verdict["missing"], verdict["reason"])
        return verdict

    def leave(self, reason: str) -> None:
        """Break off the roll call that this rank is in, or else the next one, for the ranks that wait there or will."""
        if not self.token:
            return
        # With a word of its own, or it would take the verdict that it wrote the last time for this one.
        verdict = {"missing": [self._rank], "reason": reason, "word": uuid.uuid4().hex[:12]}
        if self.number == 0 or self._propose(verdict) != verdict:
            self.number += 1
            self._propose(verdict)
        self._note_for_deletion(verdict)

    def _call(self, answer: Answer, conclude: Callable[[list[Answer]], Verdict], clock: _Clock, last: bool) -> Verdict:
        if self.token:
            self.number += 1
        elif not self._join(clock):
            return {"missing": [0], "reason": f"no word from rank 0 within {clock.timeout:g} s"}
        self._room.set(self._answer_key(self._rank), json.dumps(answer))
        if self._rank == 0:
            self._collect_and_conclude(conclude, clock)
        else:
            while not self._room.check([self._verdict_key()]):
                if not clock.pause():
                    self._give_up(clock.timeout)
        verdict: Verdict = json.loads(self._room.get(self._verdict_key()))
        answers = [self._answer_key(rank) for rank in range(self._size)]
        self._note_for_deletion(verdict)
        if "missing" in verdict:
            self._catch_up()
        # The last thing that is asked of the store, for _let_the_others_read().
        self._room.delete_key(answers[self._rank])
        if self._rank == 0 and (last or verdict.get("missing") or verdict.get("failures")):
            self._let_the_others_read(answers)
        return verdict

    def _collect_and_conclude(self, conclude: Callable[[list[Answer]], Verdict], clock: _Clock) -> None:
        keys = [self._answer_key(rank) for rank in range(self._size)]
        while (answers := self._answers(keys)) is None:
            self._hand_out_token()
            if self._room.check([self._verdict_key()]):
                return  # another rank's time was up first
            if not clock.pause():
                self._hand_out_token()
                return self._give_up(clock.timeout)
        self._words = None
        try:
            verdict = conclude([json.loads(answer) for answer in answers])
        except Exception as error:
            verdict = {"missing": [0], "reason": f"rank 0 failed to conclude the roll call: {error!r}"}
        self._propose(verdict)
        # All came to this roll call, so all have read the verdicts before it.
        for key in self._read:
            self._room.delete_key(key)
        self._read.clear()

    def _answers(self, keys: list[str]) -> list[bytes] | None:
        """Return all ranks' answers, or None if they are not all there."""
        if not self._room.check(keys):
            return None
        try:
            with torch_internals.waiting_at_most(self._room, timedelta(seconds=1)):
                return self._room.multi_get(keys)
        except RuntimeError:  # in between, another rank's time was up, and it has taken its answer back
            return None

    def _let_the_others_read(self, answers: list[str]) -> None:
        """Wait a little until all that came have read the verdict, and so deleted their answers.

        Rank 0 usually hosts the store. If it ends now, by the error that it is about to raise or because its program
        is over, the others would be told of a lost store.
        """
        clock = _Clock(2.0, self._longest_pause)
        while any(self._room.check([answer]) for answer in answers) and clock.pause():
            pass

    def _give_up(self, timeout: float) -> None:
        missing = [rank for rank in range(self._size) if not self._room.check([self._answer_key(rank)])]
        reason = f"no word from {ranks_text(missing)} within {timeout:g} s"
        if not missing:
            missing, reason = [0], f"all ranks came, but rank 0 did not conclude within {timeout:g} s"
        self._propose({"missing": missing, "reason": f"{reason} (rank {self._rank} was the first to stop waiting)"})

    def _propose(self, verdict: Verdict) -> Verdict:
        """Write the verdict, unless there is one, and return the one that counts."""
        counts: Verdict = json.loads(self._room.compare_set(self._verdict_key(), "", json.dumps(verdict)))
        return counts

    def _catch_up(self) -> None:
        """Skip the roll calls that the others gave up while this rank was away: the next one it comes to is theirs."""
        while self._room.check([f"verdict/{self.number + 1}"]):
            self.number += 1
            self._note_for_deletion(json.loads(self._room.get(self._verdict_key())))

    def _note_for_deletion(self, verdict: Verdict) -> None:
        """Have rank 0 delete the verdict, and the answers of ranks that do not come to read it and delete theirs."""
        if self._rank == 0:
            self._read += [self._verdict_key(), *(self._answer_key(rank) for rank in verdict.get("missing", ()))]

    def _join(self, clock: _Clock) -> bool:
        """Say a fresh word, and be handed the token and the number of the roll call that is on."""
        word = uuid.uuid4().hex[:12]
        self._hall.set(f"word/{self._rank}", word)
        while not self._hall.check([f"token/{word}"]):
            if not clock.pause():
                return False
        token, number = self._hall.get(f"token/{word}").decode().split()
        self._hall.delete_key(f"token/{word}")
        self._enter_room(token)
        self.number = int(number)
        return True

    def _hand_out_token(self) -> None:
        """Hand the token to the ranks that have come. A word may be an old world's, and a new one replace it."""
        if self._words is None:
            return
        for rank in range(1, self._size):
            if self._hall.check([f"word/{rank}"]):
                word = self._hall.get(f"word/{rank}")
                if word != self._words.get(rank):
                    self._hall.set(f"token/{word.decode()}", f"{self.token} {self.number}")
                    self._words[rank] = word

    def _enter_room(self, token: str) -> None:
        self.token = token
        self._room = PrefixStore(token, self._hall)

    def _answer_key(self, rank: int) -> str:
        return f"answer/{self.number}/{rank}"

    def _verdict_key(self) -> str:
        return f"verdict/{self.number}"


class _Clock:
    """Paces one rank's waiting."""

    def __init__(self, timeout: float, longest_pause: float) -> None:
        self.timeout = timeout
        self._longest_pause = longest_pause
        self._start = time.monotonic()

    def pause(self) -> bool:
        """Sleep a little and return True, or return False if the time is up."""
        waited = time.monotonic() - self._start
        if waited >= self.timeout:
            return False
        time.sleep(min(max(waited / 20, 0.0002), self._longest_pause, self.timeout - waited))
        return True


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 3 and 5", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    shown = [str(rank) for rank in ranks[:8]]
    rest = len(ranks) - len(shown)
    if rest:
        shown.append(f"{rest} more")
    text = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _clone(store: Store) -> Store:
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):  # a store of somebody's own
        return store
