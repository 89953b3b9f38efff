"""What users write, for type checkers: nothing here is run. Lines that must be refused say so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from typing_extensions import assert_type

from gpurelease import (
    GroupReport,
    ReleaseFailed,
    Report,
    RestoreFailed,
    Scope,
    Transition,
    TransitionFailed,
    current_report,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
    sleep_world,
    wake_world,
)


def returns_inside(prompts: list[str]) -> int:
    with released_world() as scope:
        assert_type(scope, Scope)
        return len(prompts)


async def returns_inside_async(prompts: list[str]) -> int:
    async with released_world(timeout=timedelta(minutes=5)) as scope:
        assert_type(scope.report, Report)
        return len(prompts)


def returns_inside_the_inverse() -> int:
    with released_world(), restored_world() as scope:
        assert_type(scope, Scope)
        return 3


@contextlib.contextmanager
def paused() -> Generator[None, None, None]:
    yield


def is_kept(group: dist.ProcessGroup) -> bool:
    return group.size() == 1


def all_options(strategy: Literal["rebuild", "suspend", "auto"], group: dist.ProcessGroup) -> Scope:
    released_world(keep=is_kept, backends="nccl", timeout=3)
    released_world(keep="weight_sync", timeout=0.5)
    released_world(keep=[group, "weight_sync"], also=[paused, paused()])
    sleep_world(strategy=strategy, keep=group, backends=("nccl",), timeout=3, also=[paused])
    return released_world(
        strategy=strategy, keep=group, backends=("nccl",), timeout=timedelta(seconds=3), also=(paused,)
    )


released_world(strategy="renew")  # refused: there is no such strategy
sleep_world(strategy="renew")  # refused: there is no such strategy
releases_world(strategy="renew")  # refused: there is no such strategy
released_world(keep=3)  # refused: that is no group
released_world(kept=())  # refused: there is no such option

with sleep_world():  # refused: it is no block
    pass

with released_world:  # refused: the parentheses were forgotten
    pass


@released_world
def bare(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@released_world()
def empty(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@released_world(keep=("weight_sync",), strategy="auto")
def with_options(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@releases_world
def other_name(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@releases_world(keep=("weight_sync",))
def other_name_with_options(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@restored_world
def inverse(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


@restored_world()
def inverse_with_parentheses(prompts: list[str], n: int = 1) -> int:
    return len(prompts) * n


for decorated in (bare, empty, with_options, other_name, other_name_with_options, inverse, inverse_with_parentheses):
    assert_type(decorated(["a"], n=2), int)
bare(3)  # refused: a decorated function has its own parameters
empty(3)  # refused: a decorated function has its own parameters
other_name_with_options(3)  # refused: a decorated function has its own parameters


class Trainer:
    @released_world
    async def rollout(self, prompts: list[str]) -> int:
        return len(prompts)

    @classmethod
    @releases_world(timeout=3)
    def of_class(cls, prompts: list[str]) -> int:
        return len(prompts)

    def sleep(self) -> Report:
        return sleep_world(also=[paused])

    def wake_up(self) -> Report:
        return wake_world(timeout=300)


async def awaits(trainer: Trainer) -> None:
    assert_type(await trainer.rollout(["a"]), int)
    assert_type(Trainer.of_class(["a"]), int)
    trainer.rollout(3)  # refused: a decorated method has its own parameters


def reads(report: Report, log: Callable[[str], None]) -> float:
    assert_type(current_report(), Report | None)
    assert_type(is_released(), bool)
    assert_type(release_depth(), int)
    assert_type(report.strategy, Literal["", "rebuild", "suspend"])
    assert_type(report.released, list[GroupReport])
    assert_type(report.transitions, list[Transition])
    for transition in report.transitions:
        assert_type(transition.kind, Literal["release", "restore"])
        if transition.kind == "freed":  # refused: there is no such kind
            log("freed")
    report.seconds("freed")  # refused: there is no such kind
    return report.seconds("release")


def recovers(log: Callable[[str], None]) -> None:
    try:
        with released_world():
            pass
    except RestoreFailed as error:
        log(f"{error.summary} {error.failures.get(0)} {error.missing}")
        wake_world()
    except (ReleaseFailed, TransitionFailed):
        raise
