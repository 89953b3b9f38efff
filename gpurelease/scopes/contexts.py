"""The contexts of a scope's ``also=``: entered once the world is released, and left before anything is restored."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from contextlib2 import AsyncExitStack

from gpurelease.errors import InvalidOption
from gpurelease.scopes.driver import Awaited, Life


class Contexts:
    """Those of one scope. They may be left and entered again while it is open, around a restored world.

    Args:
        items: Context managers, or functions that return one, which are called anew each time.

    Attributes:
        are_moving: Whether they are being entered or left.

    Raises:
        InvalidOption: An item is neither.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = tuple(items)
        for item in self._items:
            if not callable(item) and not _is_context(item):
                raise InvalidOption(f"also= takes context managers, or functions that return one, and got {item!r}")
        self._stack: Any = None
        self.are_moving = False

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def are_entered(self) -> bool:
        """Whether there are any to be left."""
        return self._stack is not None

    def enter(self) -> Life:
        """Enter them in order. If one raises, those before it are still to be left."""
        self._stack = AsyncExitStack()
        for item in self._items:
            context = item if _is_context(item) else item()
            # How it is left is noted first, and that it is entered in one go with entering it: no Ctrl-C comes between.
            entered: list[Any] = []
            if hasattr(type(context), "__aenter__"):
                self._stack.push_async_exit(partial(_leave_async, context, entered))
                yield from Awaited(partial(type(context).__aenter__, context)).wait_for()
                entered.append(None)
            else:
                self._stack.push(partial(_leave, context, entered))
                entered.extend(map(type(context).__enter__, (context,)))

    def leave(self, error: BaseException | None) -> Life:
        """Leave them in reverse order, whatever they raise.

        Args:
            error: What is on its way through them.

        Returns:
            What is on its way then, and whether a context has raised that.
        """
        now = error
        while self._stack is not None:
            leave = partial(self._stack.__aexit__, None if now is None else type(now), now, _trace_of(now))
            try:
                swallowed = yield from Awaited(leave).wait_for()
            except GeneratorExit:
                raise
            except BaseException as raised:
                now = raised  # a Ctrl-C may have come between two of them: then there are more to be left
            else:
                self._stack, now = None, None if swallowed else now
        return now, now is not None and now is not error


def _leave(context: Any, entered: list[Any], *told: Any) -> Any:
    return type(context).__exit__(context, *told) if entered else None


async def _leave_async(context: Any, entered: list[Any], *told: Any) -> Any:
    return await type(context).__aexit__(context, *told) if entered else None


def _trace_of(error: BaseException | None) -> Any:
    return None if error is None else error.__traceback__


def _is_context(item: Any) -> bool:
    return hasattr(type(item), "__enter__") or hasattr(type(item), "__aenter__")
