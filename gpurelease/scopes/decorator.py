"""A scope around every call of a function."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, cast

from gpurelease.errors import ScopeMisuse

Function = TypeVar("Function", bound=Callable[..., Any])


def decorate(function: Function, make_scope: Callable[[str], Any], name: str) -> Function:
    """Return a function that does what ``function`` does, inside a scope of its own in each call.

    Args:
        function: Plain, or ``async def``: its scope is held until its last ``await`` is done.
        make_scope: Returns a new scope; told what the user wrote to open it.
        name: The decorator's, for errors.

    Raises:
        ScopeMisuse: Here: it is a generator, a class, or nothing that can be called. At a call: a plain function
            returned what would run after the scope is over.
    """
    _refuse_what_runs_later(function, name)
    spelled = f"@{name} on {_name(function)}()"

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            async with make_scope(spelled):
                return await function(*args, **kwargs)

        return cast(Function, run_async)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with make_scope(spelled):
            result = function(*args, **kwargs)
        if _runs_later(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ScopeMisuse(
                f"{_name(function)} returned a {type(result).__name__}, whose work would go on after the scope: "
                "decorate the function that does the work (an `async def` is held until it is done), or return what it "
                "comes to"
            )
        return result

    return cast(Function, run)


def _refuse_what_runs_later(function: Callable[..., Any], name: str) -> None:
    if inspect.isclass(function):
        raise ScopeMisuse(
            f"@{name} does not decorate classes, and {_name(function)} is one: decorate the method that "
            "runs the rollout"
        )
    if isinstance(function, (classmethod, staticmethod, property)):
        raise ScopeMisuse(f"@{name} must stand below @{type(function).__name__}, next to the function")
    if not callable(function):
        raise ScopeMisuse(f"@{name} decorates functions, and got {function!r}; options are given by name")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ScopeMisuse(
            f"@{name} does not decorate generators, and {_name(function)} is one: between two of its values "
            "the caller would run in a released world. Write `with released_world():` inside it, around what needs it"
        )


def _runs_later(result: Any) -> bool:
    """Return whether a function has not come to its result yet, but to a promise of it."""
    promises = (concurrent.futures.Future, Generator, AsyncGenerator)
    return inspect.isawaitable(result) or isinstance(result, promises)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
