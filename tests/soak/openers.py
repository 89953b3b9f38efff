"""The ways to write a scope. What happens inside is a function, so that a decorator can have it too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from gpurelease import release_world, released_world, releases_world, restore_world, restored_world

Inside = Callable[[], None]
Options = dict[str, Any]


def _block(options: Options, inside: Inside) -> None:
    with released_world(**options):
        inside()


def _decorator(options: Options, inside: Inside) -> None:
    releases_world(**options)(inside)()


def _split(options: Options, inside: Inside) -> None:
    release_world(**options)
    inside()
    restore_world()


def _restored(options: Options, inside: Inside) -> None:
    with restored_world():
        inside()


async def _async(options: Options, inside: Inside) -> None:
    async with released_world(**options):
        inside()


async def _async_decorator(options: Options, inside: Inside) -> None:
    async def body() -> None:
        inside()

    await releases_world(**options)(body)()


async def _async_restored(options: Options, inside: Inside) -> None:
    async with restored_world():
        inside()


OPENERS: dict[str, Callable[[Options, Inside], None]] = {
    "block": _block,
    "decorator": _decorator,
    "split": _split,
    "restored": _restored,
}
ASYNC_OPENERS: dict[str, Callable[[Options, Inside], Coroutine[Any, Any, None]]] = {
    "async": _async,
    "async decorator": _async_decorator,
    "async restored": _async_restored,
}


def open_scope(how: str, options: Options, inside: Inside, prepare_thread: Callable[[], None]) -> None:
    """Go through a scope.

    Args:
        how: A key of one of the tables.
        options: The scope's options, where it takes any.
        inside: What happens inside.
        prepare_thread: Called in the thread of an async scope's event loop. It gets a thread of its own, since a
            loop may be running on this one already.
    """
    if how in OPENERS:
        OPENERS[how](options, inside)
        return
    errors: list[BaseException] = []

    def run() -> None:
        prepare_thread()
        try:
            asyncio.run(ASYNC_OPENERS[how](options, inside))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
