"""One WORLD's way from ARMED to RELEASED and back: all ranks go, or none does.

Each way has a roll call before anything changes and one after everything is done. In between every rank only does
its part and notes what failed; what the second verdict says, all do::

    release   plan -> roll call [-> Gloo -> roll call] -> drain -> placeholders -> tear down -> roll call -> RELEASED
                                                  somebody failed: give up, restore on all ranks -> ARMED, ReleaseFailed
    restore   roll call -> build and connect -> roll call -> put on the tables -> ARMED
                                  somebody failed: give up what was built on all ranks -> RELEASED, RestoreFailed

"Tear down" and "build and connect" are "suspend" and "resume" by that strategy.
"""

from __future__ import annotations

import logging
import os

from torch.distributed import ProcessGroup

from gpurelease import torch_internals
from gpurelease.agreement import Agreement
from gpurelease.errors import ContextFailed, ReleaseFailed, RestoreFailed, ScopeMisuse
from gpurelease.release import release
from gpurelease.report import Report, Transition
from gpurelease.restore import restore
from gpurelease.rollcall import ranks_text
from gpurelease.settings import ScopeOptions
from gpurelease.state import Phase, State

logger = logging.getLogger(__name__)

# What a user's Ctrl-C, or the end of the process, raises: nobody wants to wait for a rebuild then.
INTERRUPTS = (KeyboardInterrupt, SystemExit)


class World:
    """One WORLD on one rank. One thread at a time may call, and all ranks must.

    Args:
        group: WORLD.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._state = State(group)
        self._pid = os.getpid()
        self._contexts = False
        self._lost: tuple[int, ...] = ()

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._state.phase

    @property
    def options(self) -> ScopeOptions:
        """What it was released with the last time."""
        return self._state.options

    @property
    def is_gone(self) -> bool:
        """Whether WORLD was destroyed (another may have been made since)."""
        return torch_internals.world() is not self._state.world

    def forget(self) -> None:
        """Let go of what a destroyed WORLD left behind."""
        self._state.strategy.give_up([], self._state.limit)
        self._state.released = []
        self._state.stand_in.drop()

    def release(self, options: ScopeOptions, report: Report, *, contexts: bool = False, again: bool = False) -> None:
        """Release the groups that all their members agree on. If there are none, the report says so.

        Args:
            options: What the user asked for.
            report: Where to write what was done.
            contexts: Whether the scope enters contexts now: then ``enter_contexts`` must be called.
            again: Whether a ``restored_world()`` is left.

        Raises:
            ReleaseFailed: On all ranks; the world is ARMED.
            RestoreFailed: On all ranks; a rank failed, and the way back failed too: the world is RELEASED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        transition = Transition("release")
        self._state.options = options
        try:
            verdict = release(self._state, report, transition, contexts=contexts, again=again)
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise
        self._contexts = verdict["contexts"]
        if not report.reason:
            report.transitions.append(transition)
            logger.info("rank %d %s", self._state.rank, transition)

    def enter_contexts(self, error: BaseException | None, report: Report) -> None:
        """Hear whether the scope's contexts were entered on all ranks, if any rank has some.

        Args:
            error: What a context raised on this rank.
            report: Where to write how long it took.

        Raises:
            ReleaseFailed: On all ranks; the scope is to be left, and the world to be restored, on all ranks.
        """
        if not self._contexts:
            if error is not None:
                raise error
            return
        together = Agreement(self._state.roll_call, ReleaseFailed, self._state.timeout, report.transitions[-1])
        try:
            together.confirm("enter also=", [] if error is None else [f"also= raised {error!r}"])
        except ReleaseFailed as failure:
            self._lost = failure.missing
            raise failure from error
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise

    def restore(self, report: Report, *, body_failed: bool = False, context_error: BaseException | None = None) -> None:
        """Give the released groups backends that work, connected as the old ones were.

        Args:
            report: Where to write what was done.
            body_failed: Whether something is on its way out of the scope on this rank.
            context_error: What a context of the scope raised on this rank when it was left.

        Raises:
            RestoreFailed: On all ranks; the world is RELEASED.
            ContextFailed: A context raised on another rank, and nothing did on this one; the world is ARMED.
            ScopeMisuse: An interrupt broke off an earlier transition, or this is a forked child.
        """
        self._check_usable()
        if self._lost:
            # They were waited for once, when contexts were entered.
            lost, self._lost = self._lost, ()
            raise RestoreFailed(f"The world could not be restored without {ranks_text(lost)}.", missing=lost)
        transition = Transition("restore")
        context_failed = "" if context_error is None else repr(context_error)
        try:
            verdict = restore(self._state, transition, body_failed=body_failed, context_failed=context_failed)
        except INTERRUPTS as interrupt:
            self.leave(interrupt)
            raise
        report.transitions.append(transition)
        logger.info("rank %d %s", self._state.rank, transition)
        failed = {int(rank): text for rank, text in verdict["contexts"].items()}
        if failed and not body_failed:
            where = ranks_text(sorted(failed))
            raise ContextFailed(f"The world was restored, but also= failed on {where}:", failed)

    def doubt_stand_in(self) -> None:
        """Hear that a body failed: if Gloo stands in, a collective may have been left in its middle."""
        if self.phase is Phase.RELEASED:
            self._state.stand_in.is_doubted = True

    def leave(self, interrupt: BaseException) -> None:
        """Tell the ranks that will wait for this one why it does not come."""
        rank = self._state.rank
        self._state.roll_call.leave(f"rank {rank} left with {type(interrupt).__name__}, and rebuilds nothing")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ScopeMisuse(
                f"this process was forked off rank {self._state.rank}, and has no communicators of its own to "
                "release: call gpurelease in the process that called init_process_group()"
            )
        if self.phase in (Phase.RELEASING, Phase.RESTORING):
            raise ScopeMisuse(
                f"an interrupt broke off {self.phase.value} the world on rank {self._state.rank}: some groups have no "
                "backends; call destroy_process_group() and init_process_group() on all ranks"
            )
