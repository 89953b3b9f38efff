"""Waits where a life waits, for plain and for ``async`` scopes, and sees to it that none is left half-way.

A life is a generator that yields what it has to wait for. So there is one text of what a scope does, and two ways to
wait: in the caller's thread, or in its event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol

from gpurelease.errors import NotBuilt, ScopeMisuse
from gpurelease.torch_internals.extension import extension


class Step(Protocol):
    """Something to wait for."""

    def wait(self) -> None:
        """Wait for it in the caller's thread."""

    async def wait_async(self) -> None:
        """Wait for it in the caller's event loop."""


Life = Generator[Step | None, Any, Any]


class Awaited:
    """The outcome of something that is awaited, such as the entry of an asynchronous context.

    Args:
        make: Returns it.
    """

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        self._make = make
        self._result: Any = None

    def wait_for(self) -> Generator[Step, Any, Any]:
        """Have the driver wait, and return the outcome."""
        yield self
        return self._result

    def wait(self) -> None:
        """Go through it, if it never really waits: a stack of plain contexts does not."""
        coroutine = self._make().__await__()
        try:
            next(coroutine)
        except StopIteration as done:
            self._result = done.value
            return
        coroutine.close()
        raise ScopeMisuse("a context in also= is asynchronous: write `async with`")

    async def wait_async(self) -> None:
        """Await it."""
        self._result = await self._make()


def drive(life: Life, value: Any = None, *, error: BaseException | None = None) -> Any:
    """Go on with a life to its end, or to where it yields None, in the caller's thread.

    Args:
        life: The life; it begins if it has not begun.
        value: What it goes on with.
        error: What it goes on with instead, if it is not None.

    Returns:
        What it has returned; None if it has not come to its end.
    """
    resume: Callable[[], Step | None] = partial(life.throw, error) if error is not None else partial(life.send, value)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            return end.value
        if step is None:
            return None
        try:
            step.wait()
        except BaseException as raised:
            resume = partial(life.throw, raised)
        else:
            resume = partial(life.send, None)


async def drive_async(life: Life, value: Any = None) -> Any:
    """Do the same in the caller's event loop."""
    resume: Callable[[], Step | None] = partial(life.send, value)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            return end.value
        if step is None:
            return None
        try:
            await step.wait_async()
        except BaseException as raised:
            resume = partial(life.throw, raised)
        else:
            resume = partial(life.send, None)


def guarded(body: Callable[..., Any], rescue: Callable[[Any, BaseException], None]) -> Any:
    """Return a method that does what ``body`` does, and has ``rescue`` told of whatever comes out of it.

    Not even a Ctrl-C at the first instruction of ``body``, where no Python function can catch it, gets past ``rescue``.

    Args:
        body: A method.
        rescue: A method that takes what was raised, which goes on afterwards.
    """
    return _guarded(body, rescue, awaited=False)


def guarded_async(body: Callable[..., Coroutine[Any, Any, Any]], rescue: Callable[[Any, BaseException], None]) -> Any:
    """Return the same for an ``async def``."""
    return _guarded(body, rescue, awaited=True)


def _guarded(body: Callable[..., Any], rescue: Callable[[Any, BaseException], None], *, awaited: bool) -> Any:
    try:
        return extension().guarded(body, rescue, awaited)
    except NotBuilt:  # then no scope can be opened, and there is nothing to rescue
        return body
