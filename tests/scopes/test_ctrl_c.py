"""A Ctrl-C at every line of ours that the thread runs which opens and closes a scope: what does it leave behind?

CPython raises KeyboardInterrupt at check points of its own, which may be in front of any ``try``. ``make test`` goes
through a sample of the lines, that is another one for each kind of scope; ``make test-ctrl-c`` through all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import contextlib2
import pytest
import torch.distributed as dist

import gpurelease
from gpurelease import (
    GpuReleaseError,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
    sleep_world,
    wake_world,
)
from gpurelease.agreement.rollcall import RollCall
from gpurelease.scopes import book
from tests.cycles import total
from tests.ranks import run_ranks

OPTIONS = {"backends": ("gloo",), "timeout": 5}
OURS = (str(Path(gpurelease.__file__).parent), contextlib.__file__, str(Path(contextlib2.__file__).parent))
SAMPLE = 30  # lines, of each kind of scope
ALL = os.environ.get("CTRL_C_EVERYWHERE") == "1"  # as `make test-ctrl-c` has it

# ------------------------------------------------------------------------------------------------------------- scopes


class Counted:
    """A context for ``also=``: it counts how often it was entered, and left."""

    entered = left = 0

    def __enter__(self):
        Counted.entered += 1

    def __exit__(self, *error):
        Counted.left += 1


def plain():
    with released_world(**OPTIONS):
        pass


def with_contexts():
    with released_world(**OPTIONS, also=[Counted, Counted]):
        pass


def restored_inside():
    with released_world(**OPTIONS, also=[Counted]), restored_world():
        pass


def nested():
    with released_world(**OPTIONS), released_world(**OPTIONS, also=[Counted]):
        pass


@releases_world(**OPTIONS)
def decorated():
    pass


def split():
    sleep_world(**OPTIONS, also=[Counted])
    sleep_world(**OPTIONS)
    wake_world()


def asynchronous():
    async def main():
        async with released_world(**OPTIONS, also=[Counted]):
            await asyncio.sleep(0)

    asyncio.run(main())


SCOPES = [plain, with_contexts, restored_inside, nested, decorated, split, asynchronous]

# ---------------------------------------------------------------------------------------------------------- one Ctrl-C


class Interruption:
    """Has a Ctrl-C pending at one of the lines of ours that this thread runs.

    Args:
        library: The built ``interrupt.c``.
        at: At which line, counted from 1.

    Attributes:
        lines: How many were run.
    """

    def __init__(self, library, at):
        self._interrupt = library.interrupt
        self._armed = ctypes.c_int.in_dll(library, "armed")
        self._at = at
        self.lines = 0

    def begin(self):
        sys.settrace(self._trace)

    def end(self):
        sys.settrace(None)
        self._armed.value = 0

    def _trace(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame, event, argument):
        if event != "line":
            return self._line
        self.lines += 1
        if self.lines != self._at:
            return self._line
        self._armed.value = 1
        while (frame := frame.f_back) is not None:
            if frame.f_trace is not None:
                frame.f_trace = self._interrupt
        sys.settrace(self._interrupt)
        return self._interrupt


def interrupted_at(library, scope, is_first, at, told):
    """Interrupt ``scope`` at one line, and return that place, and all that is wrong afterwards.

    Returns:
        None, if the scope has fewer lines.
    """
    faulthandler.dump_traceback_later(20, exit=True)
    group = new_world()
    if not is_first:
        plain()
    told.clear()
    Counted.entered = Counted.left = 0
    ended, place = "no error", "outside"
    interruption = Interruption(library, at)
    try:
        interruption.begin()
        scope()
        interruption.end()
    except KeyboardInterrupt as error:
        interruption.end()
        ended = "KeyboardInterrupt"
        ours = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(OURS)]
        place = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(ours[-3:]))
    except Exception as error:
        interruption.end()
        ended = repr(error)
    if interruption.lines < at:
        return None
    return place, list(what_is_wrong(group, scope, ended, told))


def what_is_wrong(group, scope, ended, told):
    if ended not in ("KeyboardInterrupt", "no error"):
        yield f"it ended with {ended}"
    if release_depth() and scope is not split:
        yield f"release_depth() is {release_depth()}"
    # As in a `with` statement, the one that it comes upon may not be left.
    if not 0 <= Counted.entered - Counted.left <= 1:
        yield f"{Counted.entered} contexts were entered, and {Counted.left} left"
    if is_released():
        if not told and not release_depth():
            yield "it is released, and the other ranks were not told"
        try:
            wake_world()
        except GpuReleaseError as error:
            yield f"wake_world() raised {error}"
    try:
        if is_released() or release_depth() or total(value=1) != 1 or total(group, value=1) != 1:
            yield "the world is not restored"
        with released_world(**OPTIONS) as after:
            pass
        if after.report.reason:
            yield f"the next scope did nothing: {after.report.reason}"
    except (RuntimeError, GpuReleaseError) as error:
        yield f"afterwards: {error}"


def new_world():
    """Initialise WORLD afresh, with nothing left of the one before, and return a group in it."""
    book._chain.set(())
    if dist.is_initialized():
        dist.destroy_process_group()
    book._book = book.Book()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.new_group([0])


def interrupt_me(signum, frame):
    """Raise what Ctrl-C raises. With a handler that is not Python's own, asyncio puts none of its own in its place."""
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------- many of them


def sweep(rank, size, path, scope, is_first, seed):
    """Interrupt a scope at many lines; return at how many of how many, and after which of them something is wrong."""
    library = ctypes.PyDLL(path)
    library.interrupt.argtypes, library.interrupt.restype = [ctypes.py_object] * 3, None
    signal.signal(signal.SIGINT, interrupt_me)
    told, leave = [], RollCall.leave
    RollCall.leave = lambda *args: (told.append(args[1]), leave(*args))[1]
    lines = lines_of(library, scope, is_first)
    places = range(1, lines + 1) if ALL else sorted(random.Random(seed).sample(range(1, lines + 1), SAMPLE))
    wrong = []
    for at in places:
        found = interrupted_at(library, scope, is_first, at, told)
        if found is not None and found[1]:
            wrong.append((at, *found))
    faulthandler.cancel_dump_traceback_later()
    return len(places), lines, wrong


def lines_of(library, scope, is_first):
    """Return how many lines of ours a scope runs, if nothing interrupts it."""
    new_world()
    if not is_first:
        plain()
    interruption = Interruption(library, 0)
    interruption.begin()
    scope()
    interruption.end()
    return interruption.lines


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The built ``interrupt.c``."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    built = tmp_path_factory.mktemp("interrupt") / "interrupt.so"
    source = Path(__file__).with_name("interrupt.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source], check=True)
    return str(built)


@pytest.mark.parametrize("is_first", [True, False], ids=["the first scope", "a later one"])
@pytest.mark.parametrize("scope", SCOPES)
def test_after_a_ctrl_c_anywhere_the_world_can_be_restored_and_no_scope_is_open(library, scope, is_first):
    seed = f"{scope.__name__}, {is_first}"
    [(places, lines, wrong)] = run_ranks(
        sweep, 1, timeout=900 if ALL else 60, path=library, scope=scope, is_first=is_first, seed=seed
    )
    assert places == (lines if ALL else SAMPLE) and lines > 300
    assert not wrong, "\n".join(f"line {at} of {lines}, {place}: {'; '.join(notes)}" for at, place, notes in wrong)
