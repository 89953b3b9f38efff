"""What a scope did, in numbers and in one line of words."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from gpurelease import views
from gpurelease.errors import group_text

Kind: TypeAlias = Literal["release", "restore"]
SOME = 6  # names in a line of the log
Spread: TypeAlias = tuple[float, float, float]  # least, mean and most over the ranks


@dataclass(frozen=True)
class GroupReport:
    """What became of one process group.

    Attributes:
        name: torch's name of the group.
        description: Its ``group_desc``.
        ranks: Its members' global ranks, in group order.
        backend: Its backends as torch writes them ("cuda:nccl").
        released: Whether its communicators were released.
        reason: Why it was kept; empty if it was released.
        connected: Whether it had a communicator of all its members to release; None if nobody asked. Without one there
            was nothing to give back, and it has none afterwards.
        suspended_bytes: Device bytes that its communicators gave back by being suspended, or None if they were not, or
            NCCL does not say.
        stayed_bytes: Device bytes that its suspended communicators went on to hold, or None in the same way.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    backend: str
    released: bool
    reason: str = ""
    connected: bool | None = None
    suspended_bytes: int | None = None
    stayed_bytes: int | None = None

    def __str__(self) -> str:
        return group_text(self.name, self.description, self.ranks)

    def unsuspended(self) -> GroupReport:
        """Return the same for communicators that were ended after all."""
        return replace(self, suspended_bytes=None, stayed_bytes=None)


@dataclass(frozen=True)
class Memory:
    """The memory of this rank's device, as the device counts it, before and after what was done.

    Attributes:
        total_bytes: All that it has.
        free_bytes_before: What was free before.
        free_bytes_after: What was free afterwards.
        cache_bytes: What torch's caching allocator gave back in between, since its cache was emptied.
    """

    total_bytes: int
    free_bytes_before: int
    free_bytes_after: int
    cache_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What became free otherwise: what communicators gave back. Negative: what they took."""
        return self.free_bytes_after - self.free_bytes_before - self.cache_bytes


@dataclass
class Transition:
    """One way through: "release" or "restore".

    Attributes:
        kind: "release" or "restore".
        groups: How many groups of this rank went through.
        seconds: Seconds per step, in the order of the steps. "waiting" is for other ranks.
        memory: That of this rank's device, before and after, or None without one.
        freed_bytes_over_ranks: ``freed_bytes`` over all ranks that have a device, or None.
        working_seconds_over_ranks: ``working_seconds`` over all ranks, until the last roll call, or None.
        started: When it began, in seconds since the epoch, by this rank's clock.
    """

    kind: Kind
    groups: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: Memory | None = None
    freed_bytes_over_ranks: Spread | None = None
    working_seconds_over_ranks: Spread | None = None
    started: float = field(default_factory=time.time)

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps together."""
        return sum(self.seconds.values())

    @property
    def waiting_seconds(self) -> float:
        """Seconds of them in which this rank only waited for others."""
        return self.seconds.get("waiting", 0.0)

    @property
    def working_seconds(self) -> float:
        """The other seconds."""
        return self.total_seconds - self.waiting_seconds

    @property
    def freed_bytes(self) -> int | None:
        """Device bytes that communicators gave back (negative: that they took), or None without a device."""
        return None if self.memory is None else self.memory.freed_bytes

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the step called ``name``, also when it fails, and show it to profilers."""
        start = time.perf_counter()
        try:
            with _shown_to_profilers(f"gpurelease: {self.kind}: {name}"):
                yield
        finally:
            self._add(name, time.perf_counter() - start)

    def has_waited(self, step: str, seconds: float) -> None:
        """Count some of the seconds of a step as waiting for others."""
        self._add("waiting", seconds)
        self._add(step, -seconds)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        more = ("total_seconds", "waiting_seconds", "working_seconds", "freed_bytes")
        return {**asdict(self), **{name: getattr(self, name) for name in more}}

    def __str__(self) -> str:
        done = {"release": "released", "restore": "restored"}[self.kind]
        text = f"{done} {self.groups} process group{'' if self.groups == 1 else 's'} in {self.total_seconds:.3f} s"
        text += " (" + ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())
        if self.working_seconds_over_ranks:
            least, mean, most = self.working_seconds_over_ranks
            text += f"; without waiting {least:.3f} to {most:.3f} over the ranks, {mean:.3f} in the mean"
        text += ")"
        if self.memory is not None:
            verb, sign = ("freed", 1) if self.kind == "release" else ("took", -1)
            text += f", {verb} {_gigabytes(sign * self.memory.freed_bytes)} of device memory"
            if self.freed_bytes_over_ranks:
                low, mean, high = sorted(sign * each for each in self.freed_bytes_over_ranks)
                text += f" ({_gigabytes(low)} to {_gigabytes(high)} over the ranks, {_gigabytes(mean)} in the mean)"
            if self.memory.cache_bytes >= 2**20:
                text += f", and emptied torch's cache of {_gigabytes(self.memory.cache_bytes)}"
        return text


@dataclass
class Report:
    """What one scope did.

    Attributes:
        reason: Why the scope did nothing, or empty if it acted: no process group, nothing to release, disabled, or
            nested in a scope that had acted already.
        strategy: How groups were released: "rebuild" or "suspend".
        strategy_reason: Why, if ``strategy="auto"`` chose; else empty.
        groups: What became of each group of this rank.
        transitions: What was done, in order: usually a release and a restore, and in between those of a
            ``restored_world()`` inside.
    """

    reason: str = ""
    strategy: Literal["", "rebuild", "suspend"] = ""
    strategy_reason: str = ""
    groups: list[GroupReport] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)

    @property
    def released(self) -> list[GroupReport]:
        """The groups whose communicators were released."""
        return [group for group in self.groups if group.released]

    @property
    def kept(self) -> list[GroupReport]:
        """The groups that were left alone, each with the reason."""
        return [group for group in self.groups if not group.released]

    def seconds(self, kind: Kind) -> float:
        """Return the seconds that all transitions of a kind took together: "release" or "restore"."""
        return sum(transition.total_seconds for transition in self.transitions if transition.kind == kind)

    @property
    def freed_bytes(self) -> int | None:
        """Device bytes that the release freed on this rank's device, or None without a device."""
        return next((t.freed_bytes for t in self.transitions if t.kind == "release"), None)

    @property
    def suspended_bytes(self) -> int | None:
        """Device bytes that suspended communicators gave back, by NCCL's own account, or None if none told."""
        return _sum(group.suspended_bytes for group in self.groups)

    @property
    def stayed_bytes(self) -> int | None:
        """Device bytes that suspended communicators went on to hold, by NCCL's own account, or None if none told."""
        return _sum(group.stayed_bytes for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data: numbers, words, lists and dicts, as JSON has them.

        It is what to send to a process without gpurelease, such as a Ray driver.
        """
        return {
            "summary": str(self),
            "reason": self.reason,
            "strategy": self.strategy,
            "strategy_reason": self.strategy_reason,
            "freed_bytes": self.freed_bytes,
            "suspended_bytes": self.suspended_bytes,
            "stayed_bytes": self.stayed_bytes,
            "groups": [{**asdict(group), "ranks": list(group.ranks)} for group in self.groups],
            "transitions": [transition.to_dict() for transition in self.transitions],
        }

    def notes(self) -> str:
        """Return what became of groups that were not released, and which ones had nothing to give, in one line."""
        idle = [group for group in self.released if group.connected is False]
        parts = []
        if self.kept:
            parts.append("kept " + _listed(f"{group}: {group.reason}" for group in self.kept))
        if idle:
            parts.append("never used before: " + _listed(map(str, idle)))
        return "; ".join(parts)

    def __rich__(self) -> Any:
        """Show a table of all groups where ``rich`` prints this."""
        return views.rich_table(self)

    def _repr_html_(self) -> str:
        """Show a table of all groups in a notebook."""
        return views.html_table(self)

    def __str__(self) -> str:
        if self.reason and not self.transitions:
            return f"nothing done: {self.reason}"
        parts = list(map(str, self.transitions))
        if self.suspended_bytes is not None:
            gave, stayed = _gigabytes(self.suspended_bytes), _gigabytes(self.stayed_bytes or 0)
            parts.append(f"communicators suspended {gave} and held {stayed}")
        if self.strategy_reason:
            parts.append(f"strategy {self.strategy!r}: {self.strategy_reason}")
        return "; ".join(parts)


@contextmanager
def _shown_to_profilers(name: str) -> Iterator[None]:
    """Name what is done inside, for torch's profiler and for NVIDIA's (NVTX)."""
    with torch.profiler.record_function(name), ExitStack() as stack:
        if torch.cuda.is_initialized():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


def _listed(names: Iterable[str]) -> str:
    """Return some names and the number of all: there may be hundreds."""
    every = list(names)
    some = ", ".join(every[:SOME]) + (", ..." if len(every) > SOME else "")
    return f"{len(every)}: {some}"


def _sum(sizes: Iterable[int | None]) -> int | None:
    told = [size for size in sizes if size is not None]
    return sum(told) if told else None


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
