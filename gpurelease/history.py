"""What has been done since the process began, and who is told of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpurelease.errors import InvalidOption
from gpurelease.report import Kind, Report, Transition

logger = logging.getLogger(__name__)

Callback = Callable[[Report, Transition], Any]

# By name of the metric: what it is, its unit in its name as Prometheus wants it.
METRICS = {
    "transitions": "Ways through that went well.",
    "failures": "Ways through that failed on this rank.",
    "waiting_seconds": "Seconds in which this rank waited for others.",
    "working_seconds": "All other seconds.",
    "freed_bytes": "Device bytes that communicators gave back; negative: took.",
}


@dataclass
class Totals:
    """Sums over all that this process has done, each by kind ("release" and "restore").

    Attributes:
        by_kind: By kind, sums by name: see :data:`METRICS`.
    """

    by_kind: dict[str, dict[str, float]] = field(
        default_factory=lambda: {kind: dict.fromkeys(METRICS, 0) for kind in ("release", "restore")}
    )

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return them as plain data."""
        return {kind: dict(sums) for kind, sums in self.by_kind.items()}

    def to_prometheus(self) -> str:
        """Return them in Prometheus' text format, for an exporter's page or a text file collector."""
        lines = []
        for name, what in METRICS.items():
            metric = f"gpurelease_{name}_total"
            lines += [f"# HELP {metric} {what}", f"# TYPE {metric} {'gauge' if name == 'freed_bytes' else 'counter'}"]
            lines += [f'{metric}{{kind="{kind}"}} {sums[name]:.15g}' for kind, sums in self.by_kind.items()]
        return "\n".join(lines) + "\n"


class _History:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: Report | None = None
        self.totals = Totals()
        self.callbacks: list[Callback] = []


_history = _History()


def last_report() -> Report | None:
    """Return the report of the last scope of this process that did something, or None. Any thread may ask."""
    return _history.last


def totals() -> Totals:
    """Return sums over all that this process has done until now. Any thread may ask."""
    with _history.lock:
        return Totals(_history.totals.to_dict())


def on_transition(callback: Callback) -> Callable[[], None]:
    """Have a function called after each release and restore of this rank that went well.

    It is called in a thread of gpurelease, with the scope's report and the last of its ``transitions``; the scope
    waits for it. What it raises is logged, and changes nothing. It cannot open or close scopes.

    Args:
        callback: The function.

    Returns:
        A function that ends this.

    Raises:
        InvalidOption: It cannot be called.

    Example:
        >>> end = on_transition(lambda report, transition: metrics.log(transition.to_dict()))
    """
    if not callable(callback):
        raise InvalidOption(f"on_transition() takes a function, and got {callback!r}")
    with _history.lock:
        _history.callbacks.append(callback)

    def end() -> None:
        with _history.lock:
            if callback in _history.callbacks:
                _history.callbacks.remove(callback)

    return end


def add(report: Report, transition: Transition) -> None:
    """Note a transition that went well, and tell who wants to hear of it."""
    with _history.lock:
        _history.last = report
        sums = _history.totals.by_kind[transition.kind]
        sums["transitions"] += 1
        sums["waiting_seconds"] += transition.waiting_seconds
        sums["working_seconds"] += transition.working_seconds
        sums["freed_bytes"] += transition.freed_bytes or 0
        callbacks = list(_history.callbacks)
    for callback in callbacks:
        try:
            callback(report, transition)
        except Exception:
            logger.exception("a function given to on_transition() raised")


def add_failure(kind: Kind) -> None:
    """Note a transition that failed."""
    with _history.lock:
        _history.totals.by_kind[kind]["failures"] += 1
