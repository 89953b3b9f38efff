"""From one roll call to the next: say where this rank stands, hear the verdict, and do what it says.

There is no way that ranks have to go in step. Every verdict is on where all of them stand now, so a rank that was
interrupted, late or away is brought to where the others are, at whichever step they meet. Nothing is changed before all
have come, planned without a problem, and drained their devices; and nothing but what a verdict says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpurelease.agreement.answers import without_usual
from gpurelease.agreement.ballot import Answer, Answers, Verdict
from gpurelease.agreement.compact import packed, unpacked
from gpurelease.agreement.meanwhile import Meanwhile
from gpurelease.agreement.verdicts import conclude
from gpurelease.agreement.waiting import NotAllCame
from gpurelease.errors import InvalidOption, TransitionFailed
from gpurelease.groups.releasable import Releasable
from gpurelease.groups.standin import OWN_GLOO
from gpurelease.options import connects_in_turn, threads
from gpurelease.strategies.patience import Bounded
from gpurelease.strategies.pool import Job, Pool
from gpurelease.torch_internals import books, devices
from gpurelease.transition import gloo
from gpurelease.transition.aim import Aim
from gpurelease.transition.passage import Abandoned, Passage
from gpurelease.transition.steps import Steps
from gpurelease.transition.world import Decided, Phase, World

HEAR_WITHIN = 2.0  # seconds within which ranks that wait for one that has failed hear of that, and come


class Engine:
    """One rank's part in a transition. For the thread of a passage.

    Args:
        world: Where this rank stands.
        aim: What its caller wants.
        passage: Its thread, and who waits for it.
    """

    def __init__(self, world: World, aim: Aim, passage: Passage) -> None:
        self._world = world
        self._aim = aim
        self._passage = passage
        self._roll_call = world.roll_call  # which another one takes the place of, if this is left to itself in it
        self._timeout = world.timeout(aim.options)
        self._because: dict[int, str] = {}  # by rank, why a release is undone
        self._describes = False  # whether all is said of what is released, or would be, though it may be as before

    def go(self) -> Verdict:
        """Go through as many roll calls as it takes for all ranks to be in one state.

        Returns:
            The last verdict. The world may be in another phase than the caller wanted, if another rank's wanted that.

        Raises:
            ReleaseFailed: The world is ARMED, and was to be released.
            RestoreFailed: The world is RELEASED on this rank.
        """
        self._world.settled = False
        if self._aim.wants is Phase.RELEASED and self._stand_in(as_decided=True) == "none":
            self._see_what_fits()
        with devices.on_device(self._aim.device):
            pool = self._threads()
            try:
                return self._go(pool)
            except TransitionFailed as failure:
                self._aim.write_down_failure(failure, self._world.rank)
                raise
            finally:
                pool.close()

    def _go(self, pool: Pool) -> Verdict:
        self._drain(pool)
        steps = Steps(self._world, self._aim, self._passage, pool, self._timeout)
        done: dict[str, Any] = {}
        meanwhile: Meanwhile | None = None
        try:
            while True:
                verdict = self._reach(done, meanwhile)
                if verdict["do"] == "fail":
                    raise self._failed(failures=verdict["failures"])
                if verdict["do"] == "rest":
                    break
                if verdict["do"] == "describe":
                    self._describes = True
                    continue
                if verdict["do"] == "restore" and verdict["because"]:
                    self._because = verdict["because"]
                    self._aim.wants = Phase.ARMED
                self._passage.is_voting = verdict["do"] == "stand in"
                number, meanwhile = self._roll_call.number - 1, self._roll_call.meanwhile()
                done = steps.do(verdict, number, meanwhile)
                if verdict["do"] == "put on":
                    break
            with self._passage.commit():
                self._world.settled = True
        except Abandoned:
            steps.let_go()
            raise
        except BaseException:
            steps.undo()
            raise
        steps.over(verdict)
        if self._because:
            raise self._world.failure(Phase.RELEASED, failures=self._because)
        return verdict

    @property
    def _own(self) -> Releasable | None:
        """WORLD itself, if it is to be released."""
        return next((each for each in self._aim.plan.candidates if each.group is self._world.group), None)

    @property
    def wants(self) -> Phase:
        """The phase that the caller wants the world in."""
        return self._aim.wants

    def _failed(self, why: str = "", **more: Any) -> TransitionFailed:
        if self._because:
            first = "; ".join(f"rank {rank}: {text}" for rank, text in self._because.items())
            more["undoing"] = f"on the way back from a release that failed: {first}"
        return self._world.failure(self._aim.wants, why, **more)

    def _threads(self) -> Pool:
        """Make the threads that all work is done in, before anything is changed."""
        jobs = max(1, len(self._aim.plan.candidates), len(self._world.released))
        try:
            return Pool(min(jobs, threads()))
        except InvalidOption as error:
            problem = str(error)
        except RuntimeError as error:
            problem = f"it can start no more threads ({error})"
        self._aim.problem = self._aim.problem or problem
        return Pool(0)

    def _drain(self, pool: Pool) -> None:
        """Wait until all that was queued on the devices is done. If that fails, or takes too long, nothing is lost."""
        wanted = {candidate.device for candidate in self._aim.plan.candidates if candidate.device is not None}
        if self._aim.problem or not wanted:
            return
        # So that the others, who wait for this rank as long as the time-out, hear of it in time.
        limit = self._timeout / 2
        job = Job(lambda token: devices.drain(wanted))
        self._passage.may_take(limit)
        with self._aim.transition.step("drain"):
            pool.run([job], Bounded(limit))
        if job.error is not None:
            self._aim.problem = f"waiting for the device: {job.error}"

    # --------------------------------------------------------------------------------------------------- roll calls

    def _reach(self, done: Mapping[str, Any], meanwhile: Meanwhile | None) -> Verdict:
        """Hold a roll call.

        Args:
            done: What was done at the last step.
            meanwhile: What ranks have told each other since then: some may have more to do than others.

        Raises:
            ReleaseFailed, RestoreFailed: Some ranks did not come, or left.
        """
        timeout, others_get_on = self._timeout, None
        if done.get("problem"):
            # It has waited for others already, and they are told to wait no longer for it.
            timeout = min(timeout, max(HEAR_WITHIN, timeout / 4))
        elif meanwhile is not None:

            def others_get_on() -> bool:
                self._passage.may_take(timeout)
                return meanwhile.others_get_on()

        self._passage.may_take(timeout)
        with self._aim.transition.step("roll call"):
            try:
                answer = without_usual({**self._stand(), **done})
                verdict = self._roll_call.call(answer, _conclude, timeout, others_get_on)
            except NotAllCame as absent:
                raise self._failed(absent.reason, missing=absent.missing) from absent.__cause__
            finally:
                self._aim.transition.has_waited("roll call", self._roll_call.waited)
        self._passage.may_take(self._timeout)  # not, if nobody waits for it any longer
        return self._recall(unpacked(verdict))

    def _recall(self, verdict: Verdict) -> Verdict:
        """Keep in mind what was decided to release, and return a verdict that says to do as before in full."""
        world = self._world
        if "as in" in verdict:
            assert world.decided is not None
            return {**world.decided.verdict, **verdict}
        if verdict["do"] == "release":
            what = {field: verdict[field] for field in ("strategy", "strategy reason", "kept", "unconnected")}
            world.decided = Decided(self._roll_call.number - 1, _digest(self._plan()), what)
        return verdict

    def _stand(self) -> Answer:
        """Return where this rank stands, and what its caller wants: see :mod:`gpurelease.agreement.verdicts`."""
        world, aim, what = self._world, self._aim, self._what()
        return {
            "phase": world.phase.value,
            "generation": world.generation,
            "wants": aim.wants.value,
            "problem": aim.problem,
            "step": aim.step,
            "stand-in": self._stand_in(as_decided="as in" in what),
            "narrow": aim.narrow,
            "held by": world.strategy.name,
            "contexts": aim.contexts,
            "context": aim.context,
            "in turn": connects_in_turn() or any(each.in_turn for each in world.released),
            "gone": [each.key for each in world.released if not books.exists(each.group)],
            "doubts": world.doubts,
            **what,
        }

    def _what(self) -> Answer:
        """Return what this rank would release, or has released, as shortly as it will be understood."""
        world = self._world
        if world.is_released:
            return {"backends": world.options.backends, "groups": _list(world.released)} if self._describes else {}
        if self._aim.wants is not Phase.RELEASED:
            return {}
        plan, decided = self._plan(), world.decided
        if decided is not None and not self._describes and decided.digest == _digest(plan):
            return {"as in": decided.number}
        return plan

    def _plan(self) -> Answer:
        aim = self._aim
        return {
            "strategy": aim.options.strategy,
            "backends": aim.options.backends,
            "groups": _list(aim.plan.candidates),
            "unmatched": aim.plan.unmatched,
            "names": aim.plan.names,
            "world": "" if self._own is None else self._own.key,
        }

    def _see_what_fits(self) -> None:
        """See what kind of Gloo this rank has room for."""
        group, aim = self._world.group, self._aim
        if group is not None and (self._own is not None or self._world.is_released):
            aim.narrow = not gloo.may_connect_to_all(group)
            aim.problem = aim.problem or (gloo.why_no_room(group) if aim.narrow else "")

    def _stand_in(self, *, as_decided: bool) -> str:
        """Return what tells the Gloo that this rank has for WORLD from others; "none": it has none; "": it needs none.

        Args:
            as_decided: Whether the groups are released that were decided on the last time.
        """
        world = self._world
        if world.is_released and world.releasable() is None:
            return ""
        if not world.is_released:
            candidate = self._own
            if (
                as_decided
                and world.decided is not None
                and (candidate is None or candidate.key in world.decided.verdict["kept"])
            ):
                return ""
            if candidate is not None and candidate.gloo_that_stays() is not None:
                return OWN_GLOO
        usable = world.stand_in is not None and (not world.doubts or world.stand_in.made_in == OWN_GLOO)
        return world.stand_in.made_in if world.stand_in is not None and usable else "none"


def _conclude(answers: Answers) -> Verdict:
    return packed(conclude(answers))


def _list(releasables: Sequence[Releasable]) -> dict[str, list[Any]]:
    return {each.key: [each.group.size(), each.connected, each.why_not_suspended] for each in releasables}


def _digest(plan: Answer) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()
