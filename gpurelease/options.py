"""What a user can choose: the options of a scope, checked when they are given, and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from gpurelease.errors import InvalidOption

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Item: TypeAlias = ProcessGroup | DeviceMesh | str | None
    Keep: TypeAlias = Item | Iterable[Item] | Callable[[ProcessGroup], bool]

StrategyName: TypeAlias = Literal["rebuild", "suspend", "auto"]
STRATEGIES: tuple[str, ...] = get_args(StrategyName)

YES, NO = ("1", "true", "yes", "y", "on"), ("", "0", "false", "no", "n", "off")

THREADS = 8  # more gain little where ranks share cores (64 groups, 30 ms each: 8 take 0.38 s, 16 0.28, 64 0.31)
SHORTEST = 0.001  # seconds: stores count in milliseconds, and take none for "without end"
LONGEST = 366.0 * 24 * 3600  # seconds


def disabled() -> bool:
    """Return whether ``GPURELEASE_DISABLE`` turns every scope into a no-op.

    Raises:
        InvalidOption: It is neither a yes nor a no.
    """
    value = os.environ.get("GPURELEASE_DISABLE", "")
    word = value.strip().lower()
    if word not in (*YES, *NO):
        raise InvalidOption(f"GPURELEASE_DISABLE={value!r} is neither yes nor no: set it to 1 or 0, or unset it")
    return word in YES


def connects_in_turn() -> bool:
    """Return whether ``GPURELEASE_CONNECT`` is "collective": all groups are connected by one, one after the other."""
    value = os.environ.get("GPURELEASE_CONNECT", "")
    if value not in ("", "collective"):
        raise InvalidOption(f"GPURELEASE_CONNECT={value!r} is not known; there is 'collective'")
    return value == "collective"


def threads() -> int:
    """Return how many groups are ended, or built, at the same time: ``GPURELEASE_THREADS``, or 8. Ranks may differ."""
    value = os.environ.get("GPURELEASE_THREADS", "")
    if not value:
        return THREADS
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise InvalidOption(f"GPURELEASE_THREADS={value!r} is no number of threads; there is 1, 2, 3 and so on")
    return int(value)


@dataclass(frozen=True)
class ScopeOptions:
    """The options of one scope, in one form.

    Attributes:
        strategy: How groups are released.
        keep: Handles and names of groups, or one predicate on a group, that are left alone.
        backends: Names of the backends to release, or None for all that serve an accelerator.
        timeout: Longest wait for other ranks, in seconds, or None for WORLD's own time-out.
        spelled: What the user wrote to give them.
    """

    strategy: str = "rebuild"
    keep: tuple[Any, ...] | Callable[[ProcessGroup], bool] = ()
    backends: tuple[str, ...] | None = None
    timeout: float | None = None
    spelled: str = field(default="released_world()", compare=False)

    @classmethod
    def check(
        cls,
        strategy: str,
        keep: Keep,
        backends: str | Iterable[str] | None,
        timeout: float | timedelta | None,
    ) -> ScopeOptions:
        """Bring the arguments of a scope into one form.

        Raises:
            InvalidOption: An argument can never work.
        """
        if strategy not in STRATEGIES:
            raise InvalidOption(f"strategy={strategy!r} is not known; there is {', '.join(map(repr, STRATEGIES))}")
        return cls(strategy, _check_keep(keep), _check_backends(backends), _check_timeout(timeout))


def _check_keep(keep: Keep) -> tuple[Any, ...] | Callable[[ProcessGroup], bool]:
    if isinstance(keep, tuple) and not keep:
        return ()
    if callable(keep):
        return keep
    items: Iterable[Any] = keep if isinstance(keep, Iterable) and not isinstance(keep, str) else (keep,)
    return tuple(kept for item in items for kept in _kept(item))


def _kept(item: Any) -> list[Any]:
    """Return what an item in ``keep=`` has: handles and names of groups."""
    from torch.distributed import GroupMember, ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(item, (str, ProcessGroup)):
        return [item]
    if isinstance(item, DeviceMesh):
        if item.get_coordinate() is None:  # this rank is outside
            return []
        try:
            return item.get_all_groups()
        except RuntimeError as error:
            raise InvalidOption(f"keep= got a {item} that has no process groups ({error})") from error
    # A rank outside a group holds None or NON_GROUP_MEMBER for it: nothing to keep there.
    if item in (None, GroupMember.NON_GROUP_MEMBER):
        return []
    raise InvalidOption(
        f"keep= takes process groups, device meshes, names or descriptions, or one predicate, and got {item!r}"
    )


def _check_backends(backends: str | Iterable[str] | None) -> tuple[str, ...] | None:
    from torch.distributed import Backend

    if backends is None:
        return None
    names = (backends,) if isinstance(backends, str) else tuple(backends)
    known = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    for name in names:
        if not isinstance(name, str) or name.lower() not in known:
            raise InvalidOption(f"backends={names!r}: {name!r} is not a backend of this torch; there are {known}")
    if not names:
        raise InvalidOption("backends=() would release nothing; leave it out to release every accelerator's backends")
    return tuple(sorted({name.lower() for name in names}))


def _check_timeout(timeout: float | timedelta | None) -> float | None:
    """Return seconds. Whoever gives more than a year waits for a year: no clock here counts much further."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds > 0:
        raise InvalidOption(f"timeout={timeout!r} must be a positive number of seconds or a timedelta")
    return bounded(seconds)


def bounded(seconds: Real | float) -> float:
    """Return ``seconds`` as a number that every clock and store can count: at least a millisecond, at most a year."""
    return float(max(SHORTEST, min(seconds, LONGEST)))
