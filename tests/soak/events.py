"""What can happen in an episode, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

HOWS = ("with", "async", "decorated", "split", "threads", "tasks")

# What can go wrong for one rank, and where: the first for all that lie in between.
TROUBLES = {
    "late": ("entry", "exit"),
    "skips": ("entry",),
    "interrupted": ("entry", "exit"),
    "raises": ("inside",),
    "Ctrl-C": ("inside",),
    "forks": ("inside",),
    "slow build": ("exit",),
    "build fails": ("exit",),
    "store stops": ("entry", "exit"),
    "dies": ("entry", "inside", "exit"),
}
HURRIED, PATIENT = 2.5, 30.0  # seconds: the time-out of scopes in which somebody is waited for in vain, and of others


@dataclass(frozen=True)
class Trouble:
    """What goes wrong on one rank.

    Attributes:
        what: One of ``TROUBLES``.
        where: "entry", "inside" or "exit".
        rank: The rank. When the store stops, it stops for all.
        seconds: How late, how slow, or how long after the entry or exit has begun.
    """

    what: str
    where: str
    rank: int
    seconds: float

    @property
    def is_in_vain(self) -> bool:
        """Whether somebody is waited for in vain."""
        return self.what not in ("late", "raises", "forks")


@dataclass(frozen=True)
class Scope:
    """A released scope.

    Attributes:
        how: One of ``HOWS``; "threads" and "tasks" overlap.
        strategy: Its ``strategy=``.
        also: Whether it has an ``also=``.
        inner: What is inside it: "", "released" or "restored".
        keep: The number of a group that is kept, or -1.
        trouble: What goes wrong.
    """

    how: str
    strategy: str = "rebuild"
    also: bool = False
    inner: str = ""
    keep: int = -1
    trouble: Trouble | None = None

    @property
    def timeout(self) -> float:
        """Its ``timeout=``, in seconds."""
        return HURRIED if self.trouble and self.trouble.is_in_vain else PATIENT


@dataclass(frozen=True)
class NewGroup:
    """A group of some ranks is made, inside a scope or outside."""

    members: tuple[int, ...]
    inside: bool


@dataclass(frozen=True)
class DestroyGroup:
    """A group is destroyed by its members, inside a scope or outside."""

    number: int
    inside: bool


@dataclass(frozen=True)
class SetTimeout:
    """A group's time-out is changed, inside a scope or outside."""

    number: int
    seconds: int
    inside: bool


Event = Scope | NewGroup | DestroyGroup | SetTimeout


def draw(seed: int, number: int, size: int, backend: str, count: int) -> list[Event]:
    """Return the events of one episode.

    Args:
        seed: The soak's.
        number: The episode's.
        size: Number of ranks.
        backend: "gloo" or "nccl".
        count: How many events.
    """
    rng = random.Random(f"{seed}/{number}/{size}/{backend}")
    events: list[Event] = [_event(rng, size, backend) for _ in range(count)]
    if rng.random() < 0.25:  # nothing comes after that, and rank 0 has the harness's files
        where = rng.choice(TROUBLES["dies"])
        events.append(Scope("with", trouble=Trouble("dies", where, rng.randrange(1, size), rng.uniform(0, 0.05))))
    return events


def _event(rng: random.Random, size: int, backend: str) -> Event:
    kind = rng.random()
    if kind < 0.08:
        return NewGroup(tuple(sorted(rng.sample(range(size), rng.randint(1, size)))), rng.random() < 0.5)
    if kind < 0.14:
        return DestroyGroup(rng.randrange(100), rng.random() < 0.5)
    if kind < 0.2:
        return SetTimeout(rng.randrange(100), rng.randint(100, 999), rng.random() < 0.5)
    how = rng.choice(HOWS)
    scope = Scope(
        how,
        strategy=rng.choice(("rebuild", "suspend", "auto") if backend == "nccl" else ("rebuild", "auto")),
        also=rng.random() < 0.3 and how != "split",
        inner=rng.choice(("", "", "released", "restored")) if how in ("with", "async", "decorated") else "",
        keep=rng.randrange(100) if rng.random() < 0.15 else -1,
    )
    if rng.random() < 0.4:
        return scope
    what = rng.choice([what for what in TROUBLES if what != "dies"])
    where = rng.choice(TROUBLES[what])
    seconds = {
        "late": rng.uniform(0.1, 1.5),
        "interrupted": rng.choice((rng.uniform(0, 0.003), rng.uniform(0, 0.03), rng.uniform(0, 0.15))),
        "slow build": HURRIED + 2.5,
        "store stops": HURRIED + 1.5,
    }.get(what, 0.0)
    # Where several can be meant, or it is the strategy's to say, what comes of it is another question.
    how = how if how in ("with", "async", "decorated") else "with"
    strategy = "rebuild" if "build" in what else scope.strategy
    trouble = Trouble(what, where, rng.randrange(size), seconds)
    return Scope(how, strategy, scope.also, keep=scope.keep, trouble=trouble)
