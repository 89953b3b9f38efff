"""``@releases_world``: a released scope around every call of a rollout function."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gpurelease.api import released_world
from gpurelease.errors import ScopeMisuse

if TYPE_CHECKING:
    from gpurelease.options import Keep

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def releases_world(function: Function, /) -> Function: ...


@overload
def releases_world(
    *,
    strategy: str = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    also: Iterable[Any] = (),
) -> Callable[[Function], Function]: ...


def releases_world(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Run every call of a function inside a scope of its own, as if in ``with released_world(...)``.

    With and without parentheses, on functions, methods and ``async def``. The scope of an ``async def`` is held
    until its last ``await`` is done. All ranks of WORLD must call the function; a decorated function that calls
    itself, or another decorated one, releases once.

    Args:
        function: The function, if the decorator is written without parentheses.
        **options: Those of :class:`released_world`. In ``also=`` give functions that return a context manager,
            where a context manager can be entered only once.

    Returns:
        The function, with its name, signature and docs.

    Raises:
        ScopeMisuse: At decoration: the function is a generator, a class, or nothing that can be called. At a call: a
            plain function returned a coroutine, a task, a future, or a generator, that would run after the scope is
            over.

    Example:
        >>> @releases_world
        ... def rollout(prompts):
        ...     return engine.generate(prompts)
        >>> @releases_world(keep=("weight_sync",))
        ... async def rollout(prompts):
        ...     return await engine.generate(prompts)
    """
    if function is None:
        return functools.partial(_decorate, options=options)
    return _decorate(function, options)


def _decorate(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    _refuse_what_runs_later(function)
    released_world(**options)  # a bad option is told where it is written

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            async with released_world(**options):
                return await function(*args, **kwargs)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with released_world(**options):
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

    return run


def _refuse_what_runs_later(function: Callable[..., Any]) -> None:
    if inspect.isclass(function):
        raise ScopeMisuse(
            f"@releases_world does not decorate classes, and {_name(function)} is one: decorate the method that "
            "runs the rollout"
        )
    if isinstance(function, (classmethod, staticmethod, property)):
        raise ScopeMisuse(f"@releases_world must stand below @{type(function).__name__}, next to the function")
    if not callable(function):
        raise ScopeMisuse(f"@releases_world decorates functions, and got {function!r}; options are given by name")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ScopeMisuse(
            f"@releases_world does not decorate generators, and {_name(function)} is one: between two of its values "
            "the caller would run in a released world. Write `with released_world():` inside it, around what needs it"
        )


def _runs_later(result: Any) -> bool:
    """Return whether a function has not come to its result yet, but to a promise of it."""
    promises = (concurrent.futures.Future, Generator, AsyncGenerator)
    return inspect.isawaitable(result) or isinstance(result, promises)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
