"""What can happen in a soak, as data: all ranks are handed the same events, so none is told what comes next.

An episode is the life of one WORLD. Its events are checked one by one, those in a scope's body inside the scope.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

STRATEGIES = ("rebuild", "suspend", "auto")

WORLD = "world"
PATIENT = 20.0  # seconds: the time-out of scopes in which nobody waits in vain
SHORT = 3.0  # seconds: the time-out of scopes in which somebody may
LATE_BY = 1.5  # seconds that a late rank comes after the time-out
SLOW_BY = 0.2  # seconds of a rank that is slow, and not late
SHORT_WORLD = 4  # seconds: WORLD's own time-out in episodes where a collective is left in the middle


class _Brief:
    """Prints without the fields that are at their defaults."""

    def __repr__(self) -> str:
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True, repr=False)
class Trouble(_Brief):
    """What happens to one rank, once, in one transition.

    Attributes:
        rank: The rank.
        what: "raises" in place of the step or "raises after" it; is "slow" before it, or "late" by more than the
            time-out; "interrupted" is Ctrl-C; "dies" is SIGKILL.
        step: A step of ``troubles.HOOKS``, or "coming": before the rank enters or leaves the scope.
        after: How many calls of the step go well before.
    """

    rank: int
    what: Literal["raises", "raises after", "slow", "late", "interrupted", "dies"]
    step: str
    after: int = 0


@dataclass(frozen=True, repr=False)
class Raises(_Brief):
    """What the end of a scope's body raises, and on which ranks.

    Attributes:
        what: An "error", an "interrupt", or "in the middle": an error while the other ranks are in a collective.
        on: The ranks.
    """

    what: Literal["error", "interrupt", "in the middle"]
    on: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Scope(_Brief):
    """A scope is entered, its body happens, and it is left.

    Attributes:
        how: How it is written: see ``rank.OPENERS``.
        keep: Names of the groups in ``keep=``.
        keep_by: Whether they are given as handles, as names, or by a predicate.
        keep_on: The one rank that gives them, or None: all do.
        contradicts: Whether it asks for what the scope around it did not do.
        strategy: ``strategy=``.
        timeout: ``timeout=``.
        also: What the context manager in ``also=`` does; empty: there is none.
        also_on: The ranks on which it raises.
        on_entry, on_exit: What happens to a rank in the transitions.
        body: What happens inside.
        raises: What the body raises when that has happened.
        hush: Whether no collective follows, that would bring the ranks in step.
    """

    how: str
    keep: tuple[str, ...] = ()
    keep_by: Literal["handle", "name", "predicate"] = "handle"
    keep_on: int | None = None
    contradicts: bool = False
    strategy: str = "rebuild"
    timeout: float = PATIENT
    also: Literal["", "works", "raises on entry", "raises on exit"] = ""
    also_on: tuple[int, ...] = ()
    on_entry: Trouble | None = None
    on_exit: Trouble | None = None
    body: tuple[Event, ...] = ()
    raises: Raises | None = None
    hush: bool = False

    @property
    def wants(self) -> str:
        """The state of the world that it stands for."""
        return "restored" if "restored" in self.how else "released"


@dataclass(frozen=True, repr=False)
class NewGroup(_Brief):
    """All ranks make a group; ``quiet`` ones are not used before a :class:`Use`."""

    name: str
    members: tuple[int, ...]
    timeout: int
    backend: str = ""
    quiet: bool = False
    hush: bool = False


@dataclass(frozen=True, repr=False)
class Use(_Brief):
    """A quiet group is used, and from now on as often as the others."""

    name: str
    hush: bool = False


@dataclass(frozen=True, repr=False)
class Destroy(_Brief):
    """A group is destroyed, on all its members or, while it is released, on some."""

    name: str
    on: tuple[int, ...]
    hush: bool = False


@dataclass(frozen=True, repr=False)
class SetTimeout(_Brief):
    """A group's time-out is changed, on all its members."""

    name: str
    seconds: int
    hush: bool = False


@dataclass(frozen=True, repr=False)
class Restore(_Brief):
    """``restore_world()`` out of turn: to try again after RestoreFailed, or where it is a mistake."""

    trouble: Trouble | None = None
    hush: bool = False


Event: TypeAlias = Scope | NewGroup | Use | Destroy | SetTimeout | Restore


# Every episode begins and ends with these: what a process holds is compared after the first and after the last.
CYCLES = (Scope("block"), Scope("block"))


@dataclass(frozen=True)
class Episode:
    """The life of one WORLD.

    Attributes:
        size: Number of ranks.
        world_timeout: WORLD's own time-out, in seconds.
        watches: Whether the identity of backends is checked. To do so is to hold on to them, which may hide what
            their end would show: so not in every episode.
        events: What happens between the first cycles and the last.
    """

    size: int
    world_timeout: int
    watches: bool
    events: tuple[Event, ...]


def trouble_of(event: Event) -> list[Trouble]:
    """Return what goes wrong in an event and in all that happens inside it."""
    if isinstance(event, Restore):
        return [event.trouble] if event.trouble else []
    if not isinstance(event, Scope):
        return []
    inside = [trouble for inner in event.body for trouble in trouble_of(inner)]
    return [trouble for trouble in (event.on_entry, *inside, event.on_exit) if trouble]
