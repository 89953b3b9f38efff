"""Many cycles of all kinds, and what they leave behind: for the tests on Gloo and on NCCL."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gpurelease import released_world, restored_world, sleep_world, wake_world
from tests.ranks import descriptors, threads


class Left(NamedTuple):
    """What a rank holds between two cycles."""

    descriptors: int
    threads: int
    keys: int
    objects_of_ours: int
    communicators: int
    communicator_bytes: int


def one_cycle(number: int, options: dict[str, Any], use: Callable[..., None], groups: list[Any]) -> None:
    """Release and restore in one of five ways; and make or destroy a group, inside or outside."""
    everybody = list(range(dist.get_world_size()))
    kind = number % 5
    if kind == 0:
        with released_world(**options), released_world(), restored_world():
            use(groups[0])
    elif kind == 1:
        try:
            with released_world(**options):
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    elif kind == 2:
        sleep_world(**options)
        dist.barrier()
        wake_world()
    elif kind == 3:
        with released_world(**options):
            groups.append(dist.new_group(everybody))
    else:
        with released_world(**options):
            dist.destroy_process_group(groups.pop())
    if number % 10 == 0:
        extra = dist.new_group(everybody)
        use(extra)
        dist.destroy_process_group(extra)
    for group in groups:
        use(group)


def many_cycles(
    store: Any,
    cycles: int,
    every: int,
    options: Sequence[dict[str, Any]],
    use: Callable[..., None],
    count_communicators: Callable[[], tuple[int, int]] = lambda: (0, 0),
) -> tuple[list[Left], list[int]]:
    """Go through cycles, and look every so many of them at what is left.

    Args:
        store: WORLD's store.
        cycles: How many.
        every: How many lie between two looks; a multiple of 10.
        options: Options of scopes, used in turns.
        use: Uses a group, and checks the result.
        count_communicators: Returns how many communicators are alive, and the bytes that they hold.

    Returns:
        What was left, and the resident memory in KiB, at each look.
    """
    groups = [dist.group.WORLD, *(dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))]
    left, resident = [], []
    for number in range(1, cycles + 1):
        one_cycle(number, options[number % len(options)], use, groups)
        if number % every == 0:
            dist.barrier()
            gc.collect()
            time.sleep(1)  # a thread ends a moment after what it worked for
            # torch leaves some of its own for each group that was made and destroyed.
            keys = sum("gpurelease" in key for key in store.list_keys())
            objects = sum(str(type(each).__module__).startswith("gpurelease") for each in gc.get_objects())
            left.append(Left(descriptors(), threads(), keys, objects, *count_communicators()))
            resident.append(_resident())
            dist.barrier()
    return left, resident


def check(left: list[Left], resident: list[int], noise: int) -> None:
    """Check that nothing grew after the first look, but for ``noise`` KiB of resident memory."""
    assert len(set(left)) == 1, left
    assert resident[-1] - resident[0] < noise, resident


def _resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
