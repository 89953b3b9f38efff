"""What one rank does in an episode, and what it checks afterwards.

Ranks meet for the harness over files of its own: what is tried must not depend on what it is tried with.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, TCPStore

from gpurelease import (
    ReleaseFailed,
    RestoreFailed,
    ScopeMisuse,
    TransitionFailed,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
    sleep_world,
    wake_world,
)
from tests.cycles import refusal
from tests.cycles import total as total_on_host
from tests.ranks import descriptors, threads
from tests.soak.events import PATIENT, DestroyGroup, Event, NewGroup, Scope, SetTimeout, Trouble
from tests.soak.machines import Posing, machine

GROUP_TIMEOUT = timedelta(seconds=50)
SETTLED_WITHIN = 12.0  # seconds: what is made too late is closed by who makes it
PR_SET_PDEATHSIG = 1


class Wrong(AssertionError):
    """Something is not as it should be."""


def expect(holds: object, *words: object) -> None:
    """Say what is not as it should be."""
    if not holds:
        raise Wrong(*words)


def run_episode(rank: int, size: int, events: list[Event], backend: str) -> int:
    """Do an episode on one rank, and return how many events there were."""
    episode = Episode(rank, size, machine(backend))
    for number, event in enumerate(events):
        print(f"{time.time():.3f} event {number}: {event}", flush=True)
        episode.do(event)
    episode.end()
    return len(events)


class Episode:
    """One rank in one episode."""

    def __init__(self, rank: int, size: int, where: Posing) -> None:
        self.rank, self.size, self.machine = rank, size, where
        self.alive, self.is_whole = list(range(size)), True
        self._meetings = 0
        self._trouble: Trouble | None = None
        self._waker: threading.Timer | None = None
        self._host = 0
        self._files = FileStore(str(Path(os.environ["RANKS_FOLDER"]) / "harness"), -1)
        self._files.set_timeout(timedelta(seconds=200))
        self._init("first")
        self.groups: dict[int, Any] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self.time_outs: dict[int, timedelta] = {}
        self._made = 0
        self.settle_in()
        self.meet()
        self.at_first = self.footprint()
        self.meet()  # who goes on may destroy a group, and with it others' connections

    def settle_in(self) -> None:
        """Have the groups that an episode begins with, and no others."""
        for number in sorted(self.members):
            group = self.groups.pop(number)
            del self.members[number]
            if group is not None:
                dist.destroy_process_group(group)
        everybody = tuple(range(self.size))
        for members in (everybody, everybody, (0, self.size - 1), everybody[1:]):
            self.make(members)
        self.use()
        for _ in range(2):
            self.clean_scope()

    def _init(self, name: str) -> None:
        """Initialise WORLD on a store that a process of its own hosts, so that it can stop."""
        if self.rank == self.alive[0]:
            read, write = os.pipe()
            self._host = os.fork()
            if not self._host:
                _host_store(write)
            os.close(write)
            self._files.set(f"port/{name}", os.read(read, 16).decode())
            os.close(read)
        port = int(self._files.get(f"port/{name}"))
        self.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.machine.start(self.alive.index(self.rank), len(self.alive), self.store)
        self.world = dist.group.WORLD
        self.meet()  # NCCL's double waits for seconds only, and some ranks may not have found the store yet

    # -------------------------------------------------------------------------------------------------------- events

    def do(self, event: Event) -> None:
        """Do an event, and bring all ranks to one state."""
        if isinstance(event, Scope):
            self.scope(event)
        else:
            with released_world(**self.machine.options, timeout=PATIENT) if event.inside else contextlib.nullcontext():
                self.change(event)
            self.use(but_inside=isinstance(event, NewGroup) and event.inside)

    def change(self, event: NewGroup | DestroyGroup | SetTimeout) -> None:
        """Make, destroy or change a group."""
        if isinstance(event, NewGroup):
            if event.inside:  # it is its maker's own, and of no more interest
                made = dist.new_group(list(range(self.size)), backend="gloo")
                self.meet()  # torch lets one rank destroy it while another is connecting to it
                dist.destroy_process_group(made)
            else:
                self.make(event.members)
            return
        number = sorted(self.members)[event.number % len(self.members)]
        if isinstance(event, SetTimeout):
            self.time_outs[number] = timedelta(seconds=event.seconds)
            if self.groups[number] is not None:
                self.groups[number].set_timeout(self.time_outs[number])
        elif len(self.members) > 3:
            group = self.groups.pop(number)
            del self.members[number]
            if group is not None:
                dist.destroy_process_group(group)

    def make(self, members: tuple[int, ...]) -> None:
        """Make a group; all ranks must call."""
        group = dist.new_group(list(members), backend=self.machine.backend, timeout=GROUP_TIMEOUT)
        self.groups[self._made] = group if self.rank in members else None
        self.members[self._made], self.time_outs[self._made] = members, GROUP_TIMEOUT
        self._made += 1

    def scope(self, event: Scope) -> None:
        """Do a scope, check what was raised, and bring all ranks to one state."""
        trouble = event.trouble
        self.meet()
        error: BaseException | None = None
        started = time.monotonic()
        with self.going_wrong(event):
            try:
                if not (trouble and trouble.what == "skips" and trouble.rank == self.rank):
                    self.walk(event)
            except (TransitionFailed, KeyboardInterrupt, ZeroDivisionError) as raised:
                error = raised
        took = time.monotonic() - started
        print(f"  {took:.2f} s, raised {error!r}", flush=True)
        self.check_error(trouble, error)
        expect(took < 4 * event.timeout + 8, "it took", took, "s")
        if trouble and trouble.what == "dies":
            if trouble.rank == self.rank:  # a scope can be left before it is time
                time.sleep(PATIENT)
            self.without(trouble.rank)
            return
        if trouble is None or not trouble.is_in_vain:
            expect(not is_released(), "it is released after a scope in which nothing was in vain")
        self.reconcile(event)

    def walk(self, event: Scope) -> None:
        """Enter the scope, look around, and leave it."""
        trouble = event.trouble
        keep = sorted(self.members)[event.keep % len(self.members)] if event.keep >= 0 else -1
        kept = self.groups.get(keep)
        options = dict(
            self.machine.options,
            strategy=event.strategy,
            timeout=event.timeout,
            keep=[] if kept is None else [kept],
        )
        entered = Counter[str]()
        if event.also:
            options["also"] = [lambda: counting(entered)]
        before = {number: self.machine.backend_of(group) for number, group in self.groups.items() if group is not None}

        def body() -> str:
            self.stop_clock("entry")
            are_in = entered["in"] - entered["out"]
            expect(are_in >= 1 if event.also else not are_in, "also= inside:", are_in, "entered")
            self.inside(keep)
            if event.inner == "released":
                with released_world(**self.machine.options):
                    self.inside(keep)
                self.inside(keep)
            elif event.inner == "restored":
                with restored_world():
                    expect(entered["in"] == entered["out"], "also= is entered in a restored world", entered)
                    self.use()
                self.inside(keep)
            if trouble and trouble.where == "inside" and trouble.rank == self.rank:
                self.trouble_inside(trouble)
            self.start_clock("exit")
            return "result"

        async def body_async() -> str:
            return body()

        self.start_clock("entry")
        if event.how == "with":
            with released_world(**options):
                body()
        elif event.how == "decorated":
            expect(releases_world(**options)(body)() == "result", "a decorated function has lost its result")
        elif event.how == "async":

            async def scope() -> None:
                async with released_world(**options):
                    body()

            asyncio.run(scope())
        elif event.how == "split":
            asleep = sleep_world(**options)
            expect(sleep_world(**options) is asleep, "a world that was asleep was put to sleep")
            body()
            wake_world()
        elif event.how == "tasks":
            rollout = releases_world(**options)(body_async)

            async def both() -> list[str]:
                return await asyncio.gather(rollout(), rollout())

            expect(asyncio.run(both()) == ["result"] * 2, "gather has lost a result")
        else:
            self.overlap(options, keep)
        self.stop_clock("exit")
        expect(entered["in"] == entered["out"], "also= is still entered", entered)
        expect(not is_released() and release_depth() == 0, "a scope was left, and the world is released")
        for number, old in before.items():
            same = self.machine.backend_of(self.groups[number]) is old
            stays = number == keep or event.strategy != "rebuild"
            expect(stays or not same, "group", number, "was not released")
            expect(number != keep or same, "group", number, "was released, and was to be kept")

    def overlap(self, options: dict[str, Any], keep: int) -> None:
        """Two threads' scopes, of which the first that was entered is left first."""
        is_in, may_go, failed = threading.Event(), threading.Event(), []

        def other() -> None:
            self.machine.on_this_thread(self.rank)
            try:
                with released_world(**options):
                    is_in.set()
                    expect(may_go.wait(60), "nobody lets it go")
            except BaseException as error:
                failed.append(error)
            finally:
                is_in.set()

        thread = threading.Thread(target=other)
        with released_world(**options):
            thread.start()
            expect(is_in.wait(60) and not failed, "the other thread is not in", failed)
            self.inside(keep)
        expect(is_released(), "it was restored, and another thread wants it released")
        may_go.set()
        thread.join()
        expect(not failed, "the other thread raised", failed)

    def inside(self, keep: int) -> None:
        """Look at a released world."""
        expect(is_released() and dist.group.WORLD is self.world, "it is not released inside")
        trouble = self._trouble
        if trouble is None or trouble.what not in ("interrupted", "dies"):  # else not all may be here
            expect(total_on_host() == sum(range(self.size)), "Gloo in WORLD's place does not work")
        for number, group in self.groups.items():
            if group is not None and number != keep and self.machine.device == "cpu":
                expect("is released by gpurelease" in refusal(group), "group", number, "works inside")

    # ------------------------------------------------------------------------------------------------------- trouble

    def start_clock(self, where: str) -> None:
        """Be late, or have a Ctrl-C come in a moment, if that is this rank's trouble."""
        trouble = self._trouble
        if trouble is None or trouble.where != where:
            return
        if trouble.what == "store stops" and self.rank == self.alive[0]:
            os.kill(self._host, signal.SIGSTOP)
            host = self._host
            self._waker = threading.Timer(trouble.seconds, os.kill, (host, signal.SIGCONT))
            self._waker.start()
        if trouble.rank != self.rank:
            return
        if trouble.what == "late":
            time.sleep(trouble.seconds)
        elif trouble.what == "interrupted":
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, trouble.seconds))
        elif trouble.what == "dies":
            threading.Timer(trouble.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def stop_clock(self, where: str) -> None:
        """No Ctrl-C is to come any more."""
        if self._trouble and self._trouble.where == where:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def trouble_inside(self, trouble: Trouble) -> None:
        """Have this rank's trouble, in the body."""
        if trouble.what == "raises":
            _ = 1 / 0
        elif trouble.what == "Ctrl-C":
            raise KeyboardInterrupt
        elif trouble.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble.what == "forks":
            child = os.fork()
            if not child:
                _child()
            expect(os.waitpid(child, 0)[1] == 0, "a forked child hung, or was in its parent's scope")

    @contextmanager
    def going_wrong(self, event: Scope) -> Iterator[None]:
        """Prepare for trouble, and clean up after it."""
        trouble = self._trouble = event.trouble
        self._waker = None

        def interrupt(*about: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        builds: Any = contextlib.nullcontext()
        if trouble and "build" in trouble.what and trouble.rank == self.rank:
            builds = self.machine.next_build(trouble.seconds)
        try:
            with builds:
                yield
        except KeyboardInterrupt:  # it came when the scope was over
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self._trouble = None
            if self._waker is not None:
                self._waker.join()

    def check_error(self, trouble: Trouble | None, error: BaseException | None) -> None:
        """Check what this rank has raised."""
        mine = trouble is not None and trouble.rank == self.rank
        kind = type(error)
        nothing = type(None)
        expected: dict[str, Callable[[], bool]] = {
            "late": lambda: error is None,
            "forks": lambda: error is None,
            "skips": lambda: error is None if mine else kind is ReleaseFailed and error.missing == (trouble.rank,),
            "interrupted": lambda: (
                kind is nothing
                or (kind is KeyboardInterrupt if mine else _is_missed(error, trouble.rank, "left with", "no word from"))
            ),
            "raises": lambda: kind is (ZeroDivisionError if mine else nothing),
            "Ctrl-C": lambda: (
                kind is KeyboardInterrupt
                if mine
                else kind is RestoreFailed and _is_missed(error, trouble.rank, "left with KeyboardInterrupt")
            ),
            "slow build": lambda: kind is RestoreFailed,
            "build fails": lambda: kind is RestoreFailed and list(error.failures) == [trouble.rank],
            "store stops": lambda: kind is (ReleaseFailed if trouble.where == "entry" else RestoreFailed),
            "dies": lambda: (
                (kind in (ReleaseFailed, RestoreFailed) and error.missing == (trouble.rank,))
                or (kind is nothing and trouble.where != "inside")  # when all was over
            ),
        }
        if trouble is None:
            expect(error is None, "it raised", repr(error))
        else:
            expect(expected[trouble.what](), trouble, "raised", repr(error))

    # --------------------------------------------------------------------------------------------------------- after

    def reconcile(self, event: Scope) -> None:
        """The first scope, or wake_world(), to which all come, brings all to one state, whoever comes first."""
        expect(release_depth() == 0, "a scope is still open")
        states = self.gather("released" if is_released() else "armed")
        if event.trouble and event.trouble.seconds > 0.05 and self.rank == event.trouble.rank:
            time.sleep(0.3)
        if set(states) == {"released"} and event.strategy == "rebuild":
            wake_world(timeout=PATIENT)
        else:
            self.clean_scope(again="released" in states)
        expect(wake_world().reason == "the world is awake", "wake_world() had something to restore")
        self.use()

    def clean_scope(self, *, again: bool = False) -> None:
        """A scope in which nothing goes wrong.

        Args:
            again: Whether the world may be released already: then what was kept is kept still.
        """
        with released_world(**self.machine.options, timeout=PATIENT):
            if again:
                expect(is_released(), "it is not released inside")
            else:
                self.inside(-1)
        expect(not is_released(), "it is still released")

    def use(self, *, but_inside: bool = False) -> None:
        """Use all groups, in the order that all ranks have."""
        expect(dist.group.WORLD is self.world, "WORLD is another object")
        expect(dist.get_backend() == self.machine.backend, "WORLD's backend is", dist.get_backend())
        expect(self.machine.total(self.world) == sum(range(self.size)), "WORLD does not work")
        for number, group in self.groups.items():
            if group is not None:
                members = self.members[number]
                expect(tuple(dist.get_process_group_ranks(group)) == members, "group", number, "has other ranks")
                expect(self.machine.total(group) == sum(members), "group", number, "does not work")
                time_out = self.machine.backend_of(group).options._timeout
                expect(time_out == self.time_outs[number], "group", number, "has another time-out:", time_out)

    def without(self, dead: int) -> None:
        """Go on without a rank that has died, in a world of those that are left."""
        dist.destroy_process_group()
        self.alive.remove(dead)
        self.size, self.is_whole = len(self.alive), False
        self.groups, self.members = {}, {}
        if self._host:
            _end(self._host)
        self._init("second")
        world, size = self.world, self.size
        for _ in range(2):
            with released_world(**self.machine.options, timeout=PATIENT):
                expect(total_on_host() == sum(range(size)), "Gloo in the new WORLD's place does not work")
            expect(self.machine.total(world) == sum(range(size)), "the new WORLD does not work")

    def end(self) -> None:
        """Check that nothing has grown, and end."""
        self.meet()
        if self.is_whole:
            self.settle_in()
            self.meet()
            self.check_footprint()
        self.meet()
        dist.destroy_process_group()
        expect(release_depth() == 0 and not is_released(), "a scope outlives its world")
        self.meet()
        if self._host:
            _end(self._host)

    def footprint(self) -> dict[str, Any]:
        """Return what this process holds that must not grow."""
        gc.collect()
        ours = Counter(
            type(item).__name__ for item in gc.get_objects() if str(type(item).__module__).startswith("gpurelease")
        )
        return {
            "descriptors": descriptors(),
            "threads": threads(),
            **{name: ours[name] for name in ("World", "Frame", "Releasable", "Passage", "StandIn", "Life", "Meeting")},
            **self.machine.communicators(),
            "our keys": len([key for key in self.store.list_keys() if "gpurelease" in key]) if self.rank == 0 else 0,
        }

    def check_footprint(self) -> None:
        """Wait until this process holds no more than it held at first."""
        deadline = time.monotonic() + SETTLED_WITHIN
        before = self.at_first
        while grown := {what: (before[what], now) for what, now in self.footprint().items() if now > before[what]}:
            expect(time.monotonic() < deadline, "it has grown:", grown)
            time.sleep(0.1)

    # ------------------------------------------------------------------------------------------------------- harness

    def meet(self) -> None:
        """Wait for all ranks."""
        self.gather("")

    def gather(self, word: str) -> list[str]:
        """Return what all ranks say."""
        self._meetings += 1
        self._files.set(f"{self._meetings}/{self.rank}", word)
        return [self._files.get(f"{self._meetings}/{rank}").decode() for rank in self.alive]


@contextmanager
def counting(entered: Counter[str]) -> Iterator[None]:
    """A context for ``also=``."""
    entered["in"] += 1
    try:
        yield
    finally:
        entered["out"] += 1


def _is_missed(error: Any, rank: int, *words: str) -> bool:
    """Return whether an error says that a rank did not come, in one of these ways."""
    return error.missing == (rank,) and any(each in str(error) for each in words)


def _child() -> None:
    """Be a forked child: it is in none of its parent's scopes, never speaks for it, and hangs on no lock."""
    signal.alarm(20)
    code = 0 if release_depth() == 0 else 3
    try:
        with released_world():
            code = 4
    except ScopeMisuse:
        pass
    except BaseException:
        code = 5
    os._exit(code)


def _host_store(pipe: int) -> None:
    """Host a store until the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(store.port).encode())
    while True:
        signal.pause()


def _end(host: int) -> None:
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    sys.stdout.flush()
