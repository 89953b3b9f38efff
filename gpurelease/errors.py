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

from collections.abc import Mapping, Sequence


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
        lines = [summary, *(f"  rank {rank}: {text}" for rank, text in sorted(self.failures.items()))]
        super().__init__("\n".join([*lines, self.state]).rstrip())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.summary, self.failures, self.missing)


class ReleaseFailed(TransitionFailed):
    """The world could not be released, on any rank. It is as it was: every group works."""

    state = "Nothing was changed: every group works as before."


class RestoreFailed(TransitionFailed):
    """The world could not be restored, on any rank. It is still released, with Gloo standing in.

    Call :func:`gpurelease.restore_world` on all ranks to try again.
    """

    state = "It is still released, with Gloo standing in; restore_world() on all ranks tries again."


class ContextFailed(TransitionFailed):
    """A context manager in ``also=`` raised on another rank when the scope was left. The world is restored.

    The rank that it raised on raises the error itself.
    """

    state = "The world is restored: every group works."
