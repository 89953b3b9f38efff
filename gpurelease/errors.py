"""Errors: one root, one class per kind of trouble, each of which survives the way through a process pipe.

::

    GpuReleaseError
     ├── NotBuilt (ImportError)        the C++ extension is missing, or was built for another torch
     ├── InvalidOption (ValueError)    an argument that can never work
     ├── ScopeMisuse                   scopes nested, left or entered in a way that cannot be meant
     └── TransitionFailed              the ranks could not go from one state to the other together
          ├── ReleaseFailed            the world is as it was before: the groups work
          ├── RestoreFailed            the world is still released: Gloo stands in, restoring can be tried again
          └── ContextFailed            the world is restored, but an also= context failed on a rank when it was left

A collective on a released group raises a plain ``RuntimeError``: it is torch's dispatcher that raises it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

NAMES_TOLD = 12


class GpuReleaseError(Exception):
    """Root of all errors that gpurelease raises itself."""


class NotBuilt(GpuReleaseError, ImportError):
    """The C++ extension is missing or was compiled for another torch than the one that runs."""


class InvalidOption(GpuReleaseError, ValueError):
    """An argument that can never work, whatever the state of the world."""


class ScopeMisuse(GpuReleaseError, RuntimeError):
    """Scopes were nested, entered or left in a way that cannot be meant. The world did not change."""


class TransitionFailed(GpuReleaseError, RuntimeError):
    """The ranks could not release or restore the world together.

    Every rank that took part raises it, with the same contents.

    Attributes:
        summary: What could not be done, in one sentence.
        failures: What went wrong, by global rank.
        missing: The global ranks that did not come, or that left.
    """

    state = ""
    """What state the world is in, in one sentence."""

    def __init__(self, summary: str, failures: Mapping[int, str] | None = None, missing: Sequence[int] = ()) -> None:
        self.summary = summary
        self.failures = dict(failures or {})
        self.missing = tuple(missing)
        alike: dict[str, list[int]] = {}
        for rank, text in sorted(self.failures.items()):
            alike.setdefault(text, []).append(rank)
        lines = [summary, *(f"  {ranks_text(ranks)}: {text}" for text, ranks in alike.items())]
        super().__init__("\n".join([*lines, self.state, self._if_dead()]).rstrip())

    def _if_dead(self) -> str:
        return ""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.summary, self.failures, self.missing)


class ReleaseFailed(TransitionFailed):
    """The world could not be released, on any rank. It is as it was: every group works."""

    state = "The world is as it was: every group works as before."


class RestoreFailed(TransitionFailed):
    """The world is released on this rank, with Gloo standing in, and could not be brought back, or not be entered.

    Call :func:`gpurelease.wake_world` on all ranks to try again, or enter the next scope: whatever step a rank was
    at when it was interrupted, late or away, it is brought to where the others are. Only a rank that has died stays
    away: without it the others can do no more than call ``destroy_process_group()`` and make a new world.
    """

    state = "It is still released, with Gloo standing in; wake_world() on all ranks tries again."

    def _if_dead(self) -> str:
        if not self.missing:
            return ""
        return (
            f"If {ranks_text(self.missing)} died: destroy_process_group() and init_process_group() on the others "
            "make a new world."
        )


class ContextFailed(TransitionFailed):
    """A context manager in ``also=`` raised on another rank when it was left. The world is restored.

    The rank that it raised on raises the error itself.
    """

    state = "The world is restored: every group works."


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each run of ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 3 and 5", "ranks 0 to 4,095", "ranks 0, 1 and 7 to 15"."""
    pieces: list[tuple[str, int]] = []
    for first, last in runs_of(ranks):
        run = range(first, last + 1)
        pieces += [(f"{first:,} to {last:,}", len(run))] if len(run) > 3 else [(f"{rank:,}", 1) for rank in run]
    if len(pieces) > 9:
        pieces[8:] = [(f"{sum(count for _, count in pieces[8:]):,} more", 0)]
    words = [piece for piece, _ in pieces]
    if not words:
        return ""
    text = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def nearest(mistaken: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a few of ``names``, those first that look most like one of the mistaken ones."""
    found = [difflib.get_close_matches(name, names, NAMES_TOLD, cutoff=0) for name in mistaken]
    return list(dict.fromkeys(name for near in found for name in near))


def group_text(name: str, description: str, ranks: Sequence[int]) -> str:
    """Return "process group '3' (tp)"; of one that has no description, "process group '3' (ranks 0 to 7)"."""
    what = description if description not in ("", "undefined") else ranks_text(ranks)  # the latter is torch's own
    return f"process group {name!r} ({what})" if what else f"process group {name!r}"
