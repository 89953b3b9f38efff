"""The roll calls: all ranks say where they stand, and all of them read the same verdict.

They run over WORLD's own store and not over a collective, for three reasons. A store names the ranks that did not
come. A time-out breaks nothing, while a Gloo collective that times out closes its connections for good. And the
verdict is decided once and for all: it is a key that ``compare_set`` lets one rank write, so a rank that gives up,
one that concludes and one that is interrupted at the same instant still read one outcome.

Each rank appends its answer to one key and adds to a counter; who brings that to full concludes, whichever rank it is;
the others wait for the verdict in the server. That is four requests a rank, however long the last takes to come. Whose
time is up reads the answers, and concludes in the same way from those that are there: if all are, whoever was last did
not get to it. At a time-out, when all ranks' time is up at once, the first of them does so for all.

A roll call that was given up stays so. Who comes to it later joins the next one: whoever tries again meets there, and
nobody has to know why another was not in the last one, or in how many it was not.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from gpurelease.agreement.ballot import Answer, Answers, Ballot, Conclude, Verdict, given_up
from gpurelease.agreement.hall import Hall
from gpurelease.agreement.meanwhile import Meanwhile
from gpurelease.agreement.telling import Waiting, tell_of_having_come_last
from gpurelease.agreement.waiting import NotAllCame
from gpurelease.options import bounded

logger = logging.getLogger(__name__)

# Seconds that a rank who comes after another has left waits for that one to be back, before it says who left and why.
BACK_WITHIN = 1.0
# Seconds that one takes to come which has stood still, and gives that up at the same time as those that wait for it.
ON_ITS_WAY = 0.7
# Seconds after which a rank that waits was surely there before another left.
SURELY_THERE = 0.05


class RollCall:
    """The roll calls of one WORLD, as one rank takes part in them. One thread at a time may call; any may ``leave``.

    Args:
        connect: Returns a new client of WORLD's store, for us alone.
        rank: This process's rank in WORLD.
        size: Number of ranks.
        is_gone: Whether WORLD was destroyed.

    Attributes:
        number: Number of the next roll call: the same on all ranks that came to the last one.
        waited: Seconds that the last call has waited for other ranks.
    """

    def __init__(
        self, connect: Callable[[], Store], rank: int, size: int, is_gone: Callable[[], bool] = lambda: False
    ) -> None:
        self._connect = connect
        self._rank = rank
        self._size = size
        self._is_gone = is_gone
        self._hall = Hall(connect, rank, size, is_gone)
        self._client: Store | None = None
        self.waited = 0.0
        self._lock = threading.Lock()
        self._calls = 0  # how often this rank has come
        self._in = 0  # the roll call that a thread is in, or 0
        self._broken_off = 0  # the last one that this rank has left while a thread was in it
        self._answered = 0  # the last one that this rank has answered
        self._full = 0  # the last one that all have answered
        self._seldom: set[int] = set()  # those since then that have keys which are seldom used
        self.number = 1

    @property
    def token(self) -> str:
        """Fresh for every WORLD and the same on all its ranks, once the first roll call went through."""
        return self._hall.token

    @property
    def client(self) -> Store:
        """A client of WORLD's store, for us alone."""
        if self._client is None:
            self._client = self._connect()
        return self._client

    def successor(self) -> RollCall:
        """Return what goes on in place of this one, in which a thread is left: the store did not answer it."""
        other = RollCall(self._connect, self._rank, self._size, self._is_gone)
        other._hall = self._hall
        other.number, other._answered, other._full = self.number, self._answered, self._full
        other._seldom = {*self._seldom, self.number}  # the thread may yet use keys of its roll call
        return other

    def meanwhile(self) -> Meanwhile:
        """Return what ranks tell each other before the next roll call."""
        number = self.number
        room = PrefixStore(f"gpurelease/{self.token}", self.client)
        return Meanwhile(room, number, lambda: self._seldom.add(number))

    # ------------------------------------------------------------------------------------------------------- calling

    def call(
        self, answer: Answer, conclude: Conclude, timeout: float, others_get_on: Callable[[], bool] | None = None
    ) -> Verdict:
        """Answer, and wait for the verdict on all ranks' answers. All ranks must call.

        Args:
            answer: What this rank has to say; must survive JSON.
            conclude: Makes the verdict of all answers. It runs on the rank that comes last. If it says "last", a
                program may end after it.
            timeout: Longest wait, in seconds.
            others_get_on: Asked twice in that time: whether the others are only busy, so that it is too early to give
                up.

        Returns:
            The verdict, the same on all ranks.

        Raises:
            NotAllCame: On every rank that came, with the same ranks named.
        """
        with self._lock:
            self._calls += 1
            self._in = self.number
        try:
            return self._call(answer, conclude, bounded(timeout), others_get_on)
        except RuntimeError as error:  # torch's DistError and its kin
            raise store_is_silent(error) from error
        finally:
            self._in = 0

    def _call(
        self, answer: Answer, conclude: Conclude, timeout: float, others_get_on: Callable[[], bool] | None
    ) -> Verdict:
        self.waited = 0.0
        before_it_came: NotAllCame | None = None  # who had left by then, and why
        in_grace: NotAllCame | None = None
        while True:
            wait = timeout if in_grace is None else min(timeout, BACK_WITHIN)
            verdict, waited = self._take_part(answer, conclude, wait, others_get_on, in_grace)
            if "missing" not in verdict:
                return verdict
            told = NotAllCame(tuple(verdict["missing"]), verdict["reason"])
            if in_grace is not None:
                raise in_grace
            number = self.number - 1
            by_itself = "left" in verdict and self._rank in told.missing and number != self._broken_off
            if not by_itself and self._rank not in verdict.get("absent", ()):
                if "left" not in verdict or waited > SURELY_THERE or number == self._broken_off:
                    raise told
                before_it_came = told
            # Else it was given up before this rank came, perhaps by itself. Where nobody waits at the next one, those
            # that have left may be back in a moment, or be gone.
            if before_it_came is not None and not self._ballot().has_begun:
                in_grace = before_it_came

    def _take_part(
        self,
        answer: Answer,
        conclude: Conclude,
        timeout: float,
        others_get_on: Callable[[], bool] | None,
        in_grace: NotAllCame | None,
    ) -> tuple[Verdict, float]:
        """Answer the next roll call. Returns its verdict, and how many seconds were waited for it."""
        deadline = time.monotonic() + timeout
        if not self.token:
            with Waiting(None, answer).told(self._rank, timeout):
                self._hall.enter(self.client, timeout)
            self.number = self._hall.number
        self._in = self.number
        if self._rank == 0 and not self._full:
            self._hall.open(self.number, timeout)
        ballot, again = self._ballot(), self._answered == self.number
        if again and ballot.is_over:
            # A thread that the store did not answer has left it unread, and what it says was not done here.
            self.number += 1
            return given_up([self._rank], "the store did not answer", absent=[self._rank]), 0.0
        self._answered = number = ballot.number
        answers: Answers = []
        verdict: Verdict | None = None
        started = time.monotonic()
        answer = {**answer, "seldom": sorted(self._seldom)}
        if ballot.answer(answer, again=again):
            verdict, answers = ballot.conclude(conclude)
            tell_of_having_come_last(self._rank, answers)
        if verdict is None:
            waiting = Waiting(lambda: self._ballot(number, self._connect()), answer)
            with waiting.told(self._rank, timeout):
                verdict, answers = self._await(ballot, conclude, timeout, deadline, others_get_on, in_grace)
            self.waited += time.monotonic() - started
        waited = time.monotonic() - started
        self._finish(ballot, verdict, answers)
        return verdict, waited

    def _await(
        self,
        ballot: Ballot,
        conclude: Conclude,
        timeout: float,
        deadline: float,
        others_get_on: Callable[[], bool] | None,
        in_grace: NotAllCame | None,
    ) -> tuple[Verdict, Answers]:
        """Wait for the verdict, and give up when nobody has got on for as long as the time-out."""
        quiet, slices = 0, 2 if others_get_on else 1
        while quiet < slices:
            verdict = ballot.verdict_within(min(timeout / slices, deadline - time.monotonic()))
            if verdict is not None:
                return verdict, []
            quiet += 1
            if others_get_on is not None and others_get_on():
                quiet = 0
            deadline = time.monotonic() + timeout
        if others_get_on is not None:
            # Or those that stand still, in a group that this rank is not in, would be named with whom they wait for.
            verdict = ballot.verdict_within(ON_ITS_WAY)
            if verdict is not None:
                return verdict, []
        self._seldom.add(ballot.number)
        return ballot.give_up(conclude, timeout, in_grace)

    def _finish(self, ballot: Ballot, verdict: Verdict, answers: Answers) -> None:
        """Go on to the next roll call; who has concluded this one tidies up."""
        first_time, since = not self._full, self._full
        self.number = ballot.number + 1
        if "missing" not in verdict:
            self._full = ballot.number
        try:
            if verdict.get("last"):
                ballot.have_read(verdict)
            self._tidy_up(ballot, verdict, answers, first_time, since)
        except RuntimeError:
            # The verdict is known, and the program of the rank that hosts the store may be over.
            logger.debug("the store did not answer after a roll call", exc_info=True)

    def _tidy_up(self, ballot: Ballot, verdict: Verdict, answers: Answers, first_time: bool, since: int) -> None:
        if "missing" in verdict:
            return
        if first_time and self._rank == 0:
            self._hall.close(self.client)
        if answers:
            # All have come to this one, so all have read those before it.
            seldom = {number for answer in answers for number in answer["seldom"]}
            for number in range(max(1, since), ballot.number):
                self._ballot(number).delete(seldom=number in seldom)
        self._seldom = {number for number in self._seldom if number >= ballot.number}

    # ------------------------------------------------------------------------------------------------------- leaving

    def leave(self, reason: str, timeout: float, cast: Callable[[], None] = lambda: None) -> bool:
        """Break off the roll call that this rank is in, or else the next one, for the ranks that wait there or will.

        Any thread may call, also while another calls: it asks over a client of its own.

        Args:
            reason: One sentence, for the other ranks to read.
            timeout: Longest wait for rank 0, in seconds, if no roll call has gone through yet.
            cast: Called as soon as it is written.

        Returns:
            Whether that is the verdict: not if there was one, or if this rank has come again.
        """
        calls = self._calls
        client = self._connect()  # which takes a while
        self._hall.enter(client, timeout)
        with self._lock:
            if calls != self._calls:
                cast()
                return False  # a roll call that is over, and perhaps tidied up, cannot be left
            is_in, number = self._in, max(self._in or self.number, self._hall.number)
        # With a word of its own, or it would take what it wrote the last time for this.
        verdict = given_up([self._rank], reason, left=True, word=uuid.uuid4().hex[:12])
        counts = False
        while not counts and (calls == self._calls or is_in):
            if is_in:
                self._broken_off = number
            counts = self._ballot(number, client).propose(verdict) == verdict
            if is_in:
                break
            self.number = max(self.number, number + 1)
            number += not counts
        cast()
        if counts and self._rank == 0 and not self._full:
            self._hall.open(number, timeout)  # the others are told when they come
        return counts

    def _ballot(self, number: int | None = None, client: Store | None = None) -> Ballot:
        client = self.client if client is None else client
        return Ballot(client, self.token, number or self.number, self._rank, self._size)


def store_is_silent(error: BaseException | None = None) -> NotAllCame:
    """Return what is raised if WORLD's store does not answer."""
    why = "" if error is None else f" ({str(error).partition(chr(10))[0]})"
    return NotAllCame((), f"WORLD's store does not answer; its host, usually rank 0, may be gone{why}")
