"""What is, against what should be. Every difference is one line of words; no line, no failure."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gpurelease import is_released, release_depth
from tests.ranks import descriptors, threads
from tests.soak.events import WORLD
from tests.soak.machines import Posing
from tests.soak.model import Model
from tests.soak.outcomes import Expected, Group

SETTLED_WITHIN = 5.0  # seconds: a thread that was told to end may take a moment


def of_error(expected: Expected, error: BaseException | None) -> list[str]:
    """Compare what a rank raised with what it should have raised."""
    wrong = []
    found = type(error).__name__ if error is not None else ""
    if found not in expected.kind.split("|"):
        wrong.append(f"raised: expected {expected.kind or 'nothing'}, found {found or 'nothing'}")
    if error is None or wrong:
        return wrong
    if expected.missing is not None and getattr(error, "missing", None) != expected.missing:
        wrong.append(f"missing: expected {expected.missing}, found {getattr(error, 'missing', None)}")
    if expected.failed is not None:
        failures = getattr(error, "failures", {})
        if expected.text not in failures.get(expected.failed, ""):
            wrong.append(f"failures: expected {expected.text!r} of rank {expected.failed}, found {failures}")
    elif expected.text not in str(error):
        wrong.append(f"text: expected {expected.text!r} in {str(error)!r}")
    return wrong


class State:
    """Checks the state of this rank's world.

    Args:
        model: What should be so.
        machine: What it runs on.
        rank: This rank.
        handles: The groups' handles by name, which must stay the same objects; those of WORLD too.
        watches: Whether the identity of backends is checked; their last ones are held for it.
    """

    def __init__(self, model: Model, machine: Posing, rank: int, handles: dict[str, Any], watches: bool) -> None:
        self.model = model
        self.machine = machine
        self.rank = rank
        self.handles = handles
        self.watches = watches
        self._backends: dict[str, tuple[int, Any]] = {}

    def differences(self, *, sums: bool) -> list[str]:
        """Return how the state differs from the model's.

        Args:
            sums: Whether to use the groups: all ranks must.
        """
        wrong: list[str] = []
        model = self.model
        if model.unknown:
            return wrong

        def same(what: str, expected: object, found: object) -> None:
            if expected != found:
                wrong.append(f"{what}: expected {expected!r}, found {found!r}")

        same("is_released()", model.is_released, is_released())
        same("release_depth()", model.depth, release_depth())
        same("WORLD is the same object", True, dist.group.WORLD is self.handles[WORLD])
        same("dist.get_backend()", "gloo" if WORLD in model.released else self.machine.backend, dist.get_backend())
        for group in self._mine():
            wrong += self._of_group(group)
        # In the order in which all ranks have them: who waits for whom must not be a matter of chance.
        for group in self._mine() if sums else ():
            if model.works(group) and not group.quiet:
                total = self.machine.total(self.handles[group.name], self.rank + 1.0)
                group.connected = True
                same(f"sum over {group.name}", sum(member + 1.0 for member in group.members), total)
        wrong += self._of_communicators()
        return wrong

    def forget(self, *names: str) -> None:
        """Let go of the backends of groups, or of all."""
        for name in names or list(self._backends):
            self._backends.pop(name, None)

    def _mine(self) -> list[Group]:
        return [group for group in self.model.groups.values() if self.rank in group.holders]

    def _of_group(self, group: Group) -> list[str]:
        wrong = []
        handle, name = self.handles[group.name], group.name
        if dist.distributed_c10d._resolve_process_group(handle.group_name) is not handle:
            wrong.append(f"{name}: its name leads to another object")
        if (handle.rank(), handle.size()) != (group.members.index(self.rank), len(group.members)):
            wrong.append(f"{name}: it says that it is rank {handle.rank()} of {handle.size()}")
        if self.model.refuses(group):
            try:
                self.machine.total(handle, 1.0)
                wrong.append(f"{name}: expected to refuse, found that it worked")
            except RuntimeError as error:
                if "is released by gpurelease" not in str(error):
                    wrong.append(f"{name}: expected to refuse, found {error}")
            return wrong
        if name == WORLD and WORLD in self.model.released:
            return wrong
        backend = self.machine.backend_of(handle)
        timeout = int(backend.options._timeout.total_seconds())
        if timeout != group.timeout:
            wrong.append(f"{name}: time-out: expected {group.timeout}, found {timeout}")
        if self.watches:
            generation, last = self._backends.get(name, (group.generation, backend))
            if (last is backend) != (generation == group.generation):
                wrong.append(f"{name}: backend: expected the {'same' if last is not backend else 'next'} one")
            self._backends[name] = (group.generation, backend)
        return wrong

    def _of_communicators(self) -> list[str]:
        found, expected = self.machine.communicators(), self.machine.expected_communicators(self._mine(), self.model)
        return [] if found == expected else [f"communicators, bytes: expected {expected}, found {found}"]


def footprint(store: Any, machine: Posing, rank: int) -> dict[str, Any]:
    """Return what this process holds that must not grow."""
    gc.collect()
    ours = Counter(
        f"{type(item).__module__}.{type(item).__name__}"
        for item in gc.get_objects()
        if str(type(item).__module__).startswith("gpurelease")
    )
    found: dict[str, Any] = {
        "descriptors": descriptors(),
        "threads": threads(),
        "our objects": dict(sorted(ours.items())),
        "communicators": machine.communicators(),
    }
    if rank == 0:
        found["our keys"] = len([key for key in store.list_keys() if "gpurelease" in key])
    return found


def grown(before: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> list[str]:
    """Return what a process holds now and did not hold before, once it has settled."""
    deadline = time.monotonic() + SETTLED_WITHIN
    while (now := measure()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    return [
        f"{what} at the episode's end: expected {before[what]}, found {now[what]}"
        for what in before
        if now[what] != before[what]
    ]
