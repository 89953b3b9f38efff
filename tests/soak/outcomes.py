"""What the model is made of: how an event ends, groups, and open scopes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.soak.events import Scope

SLACK = 8.0  # seconds that an event may take besides all waits that are due: the machine is small and shared


@dataclass(frozen=True)
class Expected:
    """How an entry or exit ends on one rank.

    Attributes:
        kind: The class of the error, or of any of several ("A|B"); empty: none.
        failed: The rank that the error must say failed.
        missing: The ranks that it must say did not come, or None.
        text: What it must say.
    """

    kind: str = ""
    failed: int | None = None
    missing: tuple[int, ...] | None = None
    text: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an entry or exit ends, by rank, and the seconds it may take."""

    by_rank: tuple[Expected, ...]
    seconds: float = SLACK
    opened: bool = True


@dataclass
class Group:
    """A process group.

    Attributes:
        members: Global ranks.
        holders: The members that have not destroyed it.
        timeout: Seconds.
        inside: Whether it was made while the world was released: it is never released.
        generation: How many backends it has had.
        husk: Whether members destroyed it while it was released, so that the others cannot have it back.
        connected: Whether it was ever used since its last backend without communicator.
    """

    name: str
    members: tuple[int, ...]
    timeout: int
    backend: str = ""
    quiet: bool = False
    inside: bool = False
    holders: set[int] = field(default_factory=set)
    generation: int = 0
    husk: bool = False
    connected: bool = False


@dataclass
class Frame:
    """An open scope; ``again`` is what an inner ``restored_world()`` releases with when it is left."""

    wants: str
    split: bool
    acted: bool
    again: Scope | None = None
