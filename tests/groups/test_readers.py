"""Threads that know of nothing: they use groups, or only ask about them, while scopes change the groups' tables."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gpurelease import released_world, restored_world
from gpurelease.torch_internals import tables
from tests.cycles import POSING
from tests.groups.test_kinds import OutOfTree, init_posing
from tests.ranks import init_gloo, run_ranks, tcp_store


def background(rank, size, cycles):
    init_gloo(rank, size)
    alone = [dist.new_group([member]) for member in range(size)][rank]
    counts = {"done": 0, "refused": 0}
    strange, stop = [], threading.Event()

    def reduce_on_and_on():
        while not stop.is_set():
            try:
                dist.all_reduce(torch.ones(1), group=alone)
                counts["done"] += 1
            except RuntimeError as error:
                if "is released by gpurelease" in str(error):
                    counts["refused"] += 1
                else:
                    strange.append(str(error))

    thread = threading.Thread(target=reduce_on_and_on)
    thread.start()
    for _ in range(cycles):
        with released_world(**POSING):
            time.sleep(0.005)
        time.sleep(0.005)
    stop.set()
    thread.join(10)
    return thread.is_alive(), counts["done"] > cycles, counts["refused"] > cycles, strange


def test_a_background_thread_gets_the_placeholder_s_error_and_nothing_else():
    for alive, done, refused, strange in run_ranks(background, 2, cycles=100):
        assert (alive, done, refused) == (False, True, True)
        assert strange == []


# ------------------------------------------------------------------------------------------------------------- readers

QUESTIONS = {
    "get_rank": dist.get_rank,
    "get_world_size": dist.get_world_size,
    "size": lambda group: (group.size(), group.rank()),
    "name": lambda group: (group.group_name, group.group_desc),
    "resolved": lambda group: dist.distributed_c10d._resolve_process_group(group.group_name) is group,
    "ranks": dist.get_process_group_ranks,
    "device types": lambda group: sorted(device.type for device in group._device_types),
    "get_backend": dist.get_backend,
    "_get_backend": lambda group: {group._get_backend(device).size() for device in group._device_types},
}


def ask(names, of, stop, asked, strange):
    """Ask all the time, and note what is answered that was not answered before."""
    expected = {name: [QUESTIONS[name](of)] for name in names}
    expected.get("get_backend", []).append("gloo")  # WORLD's, meanwhile
    expected.get("device types", []).extend((["cpu"], ["cpu", "privateuseone"]))
    while not stop.is_set():
        for name in names:
            try:
                answer = QUESTIONS[name](of)
                asked[name] += 1
                if answer not in expected[name]:
                    strange.append((name, answer))
            except Exception as error:
                strange.append((name, repr(error)))
        time.sleep(0)


@contextmanager
def asked_all_the_time(*groups):
    """Have threads ask all of it of ``groups``; yields what was answered strangely."""
    asked, strange, stop = dict.fromkeys(QUESTIONS, 0), [], threading.Event()
    threads = [threading.Thread(target=ask, args=(list(QUESTIONS), of, stop, asked, strange)) for of in groups]
    for thread in threads:
        thread.start()
    try:
        yield strange
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert min(asked.values()) > 20, asked


def written_again_and_again(rank, size, seconds):
    """Swap WORLD's rows as fast as that goes."""
    init_gloo(rank, size)
    world = dist.group.WORLD
    live = tables.read_table(world)
    shells = [row._replace(backend=tables.make_shell(row.backend, "It", None)) for row in live]
    devices = tables.device_types(world)
    swaps, end = 0, time.monotonic() + seconds
    with asked_all_the_time(world, world) as strange:
        while time.monotonic() < end or swaps < 30:
            tables.write_table(world, shells, ["cpu"])
            tables.write_table(world, live, devices)
            swaps += 1
    return strange[:5], swaps > 20


def test_readers_never_notice_that_a_table_is_written():
    """A crash of the rank fails the test, too."""
    assert run_ranks(written_again_and_again, 1, seconds=2) == [([], True)]


def init_without_cpu(rank, size):
    """Initialise WORLD on a backend that does not serve "cpu": its table has a row more once Gloo stands in."""
    dist.Backend.register_backend("posing", OutOfTree, devices=["privateuseone"])
    dist.init_process_group("posing", store=tcp_store(rank, size), rank=rank, world_size=size)


def scopes_come_and_go(rank, size, seconds, init, backend):
    init(rank, size)
    group = dist.new_group(list(range(size)))
    cycles, end, go_on = 0, time.monotonic() + seconds, True  # at least five, on a machine under load
    with asked_all_the_time(dist.group.WORLD, group) as strange:
        while go_on:
            with released_world(backends=(backend,), timeout=20):
                votes = [None] * size
                dist.all_gather_object(votes, time.monotonic() < end)
                go_on = all(votes) or cycles < 4
                with restored_world():
                    pass
            cycles += 1
    return strange[:5], cycles >= 5


@pytest.mark.parametrize(
    "init, backend",
    [(init_gloo, "gloo"), (partial(init_posing, extended=True), "posing"), (init_without_cpu, "posing")],
)
def test_readers_never_notice_that_scopes_come_and_go(init, backend):
    assert run_ranks(scopes_come_and_go, 2, seconds=2, init=init, backend=backend) == [([], True)] * 2
