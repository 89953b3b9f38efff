"""The scopes as users write them: context managers, plain and async, that also decorate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from gpurelease.options import ScopeOptions, StrategyName
from gpurelease.report import Report
from gpurelease.scopes.book import book
from gpurelease.scopes.contexts import Contexts
from gpurelease.scopes.decorator import Function
from gpurelease.scopes.frame import Frame
from gpurelease.scopes.scope import Scope
from gpurelease.transition.world import Phase

if TYPE_CHECKING:
    from gpurelease.options import Keep


@overload
def released_world(function: Function, /) -> Function: ...


@overload
def released_world(
    *,
    strategy: StrategyName = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    also: Iterable[Any] = (),
) -> Scope: ...


def released_world(
    function: Callable[..., Any] | None = None,
    /,
    *,
    strategy: StrategyName = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    also: Iterable[Any] = (),
) -> Any:
    """Release the communicators of all groups for the length of a ``with`` block, or of each call of a function.

    Inside, every NCCL group is an empty shell that refuses collectives, and its device memory is free; WORLD runs on
    Gloo: object collectives, barriers, CPU collectives and ``new_group()`` work. Afterwards every group works again,
    and is the same object as before, wherever it is held. Also works with ``async with``; also functions as a
    decorator, with and without parentheses, as :func:`releases_world` does.

    All ranks of WORLD must enter and leave, from any one thread each; a rank that does not come is named by an error
    on all others after ``timeout``. Scopes that only want the world released may overlap in any way, of blocks, tasks
    and threads: it is released while one is open, and the last that is left restores it.

    A thread of gpurelease does the work, and the caller only waits: with ``async with`` its event loop goes on
    meanwhile. What interrupts the wait is told to the other ranks at once, and raised as itself.

    If the body raises, the world is restored and the exception goes on. ``KeyboardInterrupt`` and ``SystemExit`` go
    on at once: nothing is rebuilt, and the other ranks are told.

    Args:
        function: The function, if this is a decorator written without parentheses.
        strategy: How groups are released. ``"rebuild"`` shuts their communicators down and makes new ones, with the
            same options, at the end: it gives back everything. ``"suspend"`` keeps them and has NCCL give back what it
            can of their memory (torch 2.12, NCCL 2.29.7 and up), which takes less time. ``"auto"`` suspends if all
            communicators on all ranks can be suspended, and else rebuilds; the report says which, and why.
        keep: What is left alone: a process group, a DeviceMesh with all its groups, a name or description of groups,
            several of these, or one predicate on a group. A group is released only if all its members release it. A
            name that no rank knows fails on all ranks, with the names that there are.
        backends: Names of the backends to release ("nccl"); by default all that serve an accelerator. ``("gloo",)``
            shows the whole life cycle on a machine without a GPU.
        timeout: Longest wait for other ranks, in seconds or as a timedelta; by default WORLD's own time-out. It bounds
            waiting for ranks that do not come, and steps in which no rank gets on: not work that goes on.
        also: Context managers, or functions that return one, that are entered once the world is released and left
            before it is restored, also in the middle, by :func:`restored_world`: memory savers, offloading. Functions
            are called anew for each entry. In ``async with`` they may be asynchronous. If one raises on entry, the
            scope is entered on no rank. They cannot open or close scopes themselves.

    Returns:
        A :class:`Scope`, which the block yields too; its ``report`` says what became of each group, and what it took
        and gave. Or the decorated function, with its name, signature and docs.

    Raises:
        InvalidOption: An argument can never work.
        NotBuilt: On entry: the C++ extension is missing, or was built for another torch.
        ScopeMisuse: On entry: the scope contradicts those that are open. At decoration: see :func:`releases_world`.
        ReleaseFailed: On entry, on all ranks. The world is as it was.
        RestoreFailed: On all ranks. The world is still released; :func:`wake_world`, or the next scope to which all
            come, brings all ranks to one state.
        ContextFailed: On exit, where nothing else was raised: an ``also=`` context raised on another rank. The world is
            restored.

    Example:
        >>> with released_world() as scope:
        ...     samples = engine.generate(prompts)
        >>> print(scope.report)
        released 18 process groups in 0.050 s (...), freed 7.81 GiB of device memory (...); restored 18 ...
        >>> @released_world
        ... def rollout(prompts):
        ...     return engine.generate(prompts)
    """
    scope = _released("released_world", strategy, keep, backends, timeout, also)
    return scope if function is None else scope(function)


@overload
def releases_world(function: Function, /) -> Function: ...


@overload
def releases_world(
    *,
    strategy: StrategyName = "rebuild",
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
        **options: Those of :func:`released_world`. In ``also=`` give functions that return a context manager,
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
    decorator = _released("releases_world", **options).__call__
    return decorator if function is None else decorator(function)


def _released(
    name: str,
    strategy: str = "rebuild",
    keep: Keep = (),
    backends: str | Iterable[str] | None = None,
    timeout: float | timedelta | None = None,
    also: Iterable[Any] = (),
) -> Scope:
    """Return a scope of :func:`released_world`. What can never work is told here, where it is written."""
    options, items = ScopeOptions.check(strategy, keep, backends, timeout), tuple(also)
    Contexts(items)
    return Scope(lambda spelled: Frame(Phase.RELEASED, spelled, options, Contexts(items)), name)


@overload
def restored_world(function: Function, /) -> Function: ...


@overload
def restored_world() -> Scope: ...


def restored_world(function: Callable[..., Any] | None = None, /) -> Any:
    """Restore the world for the length of a ``with`` block inside a released scope, for weight sync in mid-rollout.

    At the end of the block the world is released again, with the options of the scope around it. Contexts in ``also=``
    of the scopes around are left before, and entered again after it. Where the world is not released, nothing is done.
    All ranks of WORLD must enter and leave. Also works with ``async with``; also functions as a decorator, with and
    without parentheses.

    Args:
        function: The function, if this is a decorator written without parentheses.

    Returns:
        A :class:`Scope`, which the block yields too; its ``report`` says what was done. Or the decorated function.

    Raises:
        RestoreFailed: On entry, on all ranks. The world is still released.
        ReleaseFailed: On exit, on all ranks. The world is restored.
        ScopeMisuse: On entry: another task or thread is inside a scope that wants the world released. At decoration:
            see :func:`releases_world`.

    Example:
        >>> with released_world():
        ...     samples = engine.generate(prompts)
        ...     with restored_world():
        ...         broadcast_weights(model, engine)
        ...     samples += engine.generate(more_prompts)
    """
    scope = Scope(lambda spelled: Frame(Phase.ARMED, spelled, ScopeOptions()), "restored_world")
    return scope if function is None else scope(function)


def is_released() -> bool:
    """Return whether the groups of the current WORLD are released now. Any thread of any rank may ask."""
    return book().is_released()


def release_depth() -> int:
    """Return how many open scopes want the current WORLD released. Any thread of any rank may ask."""
    return book().depth()


def current_report() -> Report | None:
    """Return the report of the open scope that released the world, or None: for code inside a decorated rollout.

    What is done later, such as the restore, is added to the same object. Any thread of any rank may ask.
    """
    return book().report()
