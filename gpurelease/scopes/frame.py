"""One open scope: what it wants, and how far it has come."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from gpurelease.options import ScopeOptions
from gpurelease.report import Report
from gpurelease.scopes.contexts import Contexts
from gpurelease.transition.passage import Passage
from gpurelease.transition.world import Phase, World


def whoami() -> str:
    """Return the thread, and the asyncio task if there is one, that asks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"thread {threading.current_thread().name!r}" + (f", task {task.get_name()!r}" if task else "")


@dataclass(eq=False)
class Frame:
    """One open scope.

    Attributes:
        wants: The state of the world that it stands for.
        spelled: What the user wrote to open it.
        options: Its options.
        contexts: Those of its ``also=``.
        world: The WORLD that it is about, or None if it can have no effect.
        report: What it did.
        is_split: Whether it was opened by a call, and belongs to no thread or task.
        is_inside: Whether its entry is over.
        is_entering: Whether other ranks count on this one to come to a roll call, or to say that it does not.
        is_told: Whether they were told.
        passage: The last transition that was made for it.
        is_over: Whether all that it had to do is done.
        life: What it does, stopped where its body runs.
        opener: The thread, and the asyncio task if there is one, that opened it.
        pid: The process that it was opened in: a child that is forked inside it is none of its business.
    """

    wants: Phase
    spelled: str
    options: ScopeOptions
    contexts: Contexts = field(default_factory=Contexts)
    world: World | None = None
    report: Report = field(default_factory=Report)
    is_split: bool = False
    is_inside: bool = False
    is_entering: bool = False
    is_told: bool = False
    passage: Passage | None = None
    is_over: bool = False
    life: Any = None  # a Life
    pid: int = field(default_factory=os.getpid)
    opener: str = field(default_factory=whoami)

    def __str__(self) -> str:
        return f"{self.spelled} (opened by {self.opener})"
