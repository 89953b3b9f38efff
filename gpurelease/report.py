"""What a scope did, in numbers and in one line of words."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["release", "restore"]


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

    def unsuspended(self) -> GroupReport:
        """Return the same for communicators that were ended after all."""
        return replace(self, suspended_bytes=None, stayed_bytes=None)


@dataclass
class Transition:
    """One way through: "release" or "restore".

    Attributes:
        kind: "release" or "restore".
        groups: How many groups of this rank went through.
        seconds: Seconds per step, in the order of the steps.
        freed_bytes: Device bytes that became free on this rank's device (negative: that were taken), or None
            without a device.
        freed_bytes_over_ranks: The least and the most of them over all ranks that have a device, or None.
    """

    kind: Kind
    groups: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    freed_bytes: int | None = None
    freed_bytes_over_ranks: tuple[int, int] | None = None

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps together."""
        return sum(self.seconds.values())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the step called ``name``, also when it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        done = {"release": "released", "restore": "restored"}[self.kind]
        text = f"{done} {self.groups} process group{'' if self.groups == 1 else 's'} in {self.total_seconds:.3f} s"
        text += " (" + ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items()) + ")"
        if self.freed_bytes is not None:
            verb, sign = ("freed", 1) if self.kind == "release" else ("took", -1)
            text += f", {verb} {_gigabytes(sign * self.freed_bytes)} of device memory"
            if self.freed_bytes_over_ranks:
                low, high = sorted(sign * edge for edge in self.freed_bytes_over_ranks)
                text += f" ({_gigabytes(low)} to {_gigabytes(high)} over the ranks)"
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
    strategy: str = ""
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


def _sum(sizes: Iterable[int | None]) -> int | None:
    told = [size for size in sizes if size is not None]
    return sum(told) if told else None


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
