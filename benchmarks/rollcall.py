"""What it takes thousands of ranks to decide: a roll call over a real TCPStore, with simulated ranks.

    python -m benchmarks.rollcall [--ranks 64 256 1024 4096] [--groups 64] [--json FILE]

A rank is a thread here, with a client of the store of its own; a few processes share the ranks, another one hosts the
store. So what all clients do takes this machine's few cores, and seconds are far more than on a machine for each rank.
What stays the same there is told apart: requests and bytes of a rank; CPU seconds of the server's thread, that answers
all ranks; of the one rank that reads all answers and concludes; and of a rank in the mean, with what it costs that many
of them share an interpreter. Bytes are what the kernel has counted on the server's connections.

All are connected before. "first": the token is handed out, and each rank tells all its groups; "later": nothing has
changed since.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from benchmarks.sheet import Sheet, parser, spread
from gpurelease.agreement import ballot, hall, rollcall
from gpurelease.agreement.answers import without_usual
from gpurelease.agreement.compact import packed
from gpurelease.agreement.rollcall import RollCall
from gpurelease.agreement.verdicts import conclude
from gpurelease.torch_internals.stores import client_of

PROCESSES = 4
LATER = 7  # roll calls
BYTES_AT = 120  # where Linux tells of acknowledged and received bytes in TCP_INFO
REQUESTS = {"get": 2}  # torch's client sends a WAIT and a GET

_context = multiprocessing.get_context("forkserver")


# ---------------------------------------------------------------------------------------------------------- the server


def serve(pipe: Connection) -> None:
    """Host the store, and tell when asked what that has cost."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send((time.process_time(), traffic()))


def traffic() -> int:
    """Return how many bytes have gone over this process's connections, both ways."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(descriptor))
        except OSError:  # it is none
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_AT + 16)
            total += sum(struct.unpack_from("QQ", info, BYTES_AT))
        connection.detach()
    return total


# ----------------------------------------------------------------------------------------------------------- the ranks


class Counting:
    """Counts the requests that a rank makes over a prefix of its client."""

    made = 0

    def __init__(self, prefix: str, client: Any) -> None:
        self._store = PrefixStore(prefix, client)

    def __getattr__(self, name: str) -> Any:
        Counting.made += REQUESTS.get(name, 1)
        return getattr(self._store, name)


def take_part(pipe: Connection, port: int, size: int, ranks: range, groups: int) -> None:
    """Be some of the ranks; tell after each roll call what it took all of them, and the one that concluded."""
    ballot.PrefixStore = hall.PrefixStore = rollcall.PrefixStore = Counting
    concluding: list[float] = []
    read_and_conclude = ballot.Ballot.conclude

    def timed(self: Any, *args: Any) -> Any:
        start = time.thread_time()
        try:
            return read_and_conclude(self, *args)
        finally:
            concluding.append(time.thread_time() - start)

    ballot.Ballot.conclude = timed
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    roll_calls = [RollCall(lambda: client_of(store), rank, size) for rank in ranks]
    whole = [without_usual({**stands(), **plan(rank, size, groups)}) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as threads:
        clients = threads.map(lambda each: each.client, roll_calls)
        pipe.send(len(list(clients)))
        while number := pipe.recv():
            answers = whole if number == 1 else [without_usual({**stands(), "as in": number - 1})] * len(ranks)
            concluding.clear()
            requests, cpu = Counting.made, time.process_time()
            calls = [
                threads.submit(roll_call.call, answer, lambda answers: packed(conclude(answers)), 120.0)
                for roll_call, answer in zip(roll_calls, answers, strict=True)
            ]
            assert {call.result()["do"] for call in calls} == {"release"}
            pipe.send((time.perf_counter(), time.process_time() - cpu, Counting.made - requests, list(concluding)))


def stands() -> dict[str, Any]:
    """Return what a rank that wants the world released says of itself."""
    return {"phase": "armed", "generation": 0, "wants": "released", "stand-in": "0123456789ab"}


def plan(rank: int, size: int, groups: int) -> dict[str, Any]:
    """Return what a rank says of its groups: WORLD, and groups of eight neighbours."""
    names = [f"{number}:{rank // 8 if number else 0}" for number in range(groups)]
    keys = [hashlib.sha256(name.encode()).hexdigest()[:16] for name in names]
    sizes = [size, *[8] * (groups - 1)]
    listed = {key: [members, True, ""] for key, members in zip(keys, sizes, strict=True)}
    return {"strategy": "rebuild", "groups": listed, "world": keys[0]}


# ------------------------------------------------------------------------------------------------------------ together


class Simulation:
    """All ranks, and the server."""

    def __init__(self, size: int, groups: int) -> None:
        self._size = size
        self._server = start(serve)
        port = self._server.recv()
        each = size // PROCESSES
        self._ranks = [
            start(take_part, port, size, range(first, first + each), groups) for first in range(0, size, each)
        ]
        for ranks in self._ranks:
            ranks.recv()

    def roll_call(self, number: int) -> dict[str, float]:
        """Hold a roll call, and return what it took."""
        cpu_before, bytes_before = self._ask_server()
        started = time.perf_counter()
        for ranks in self._ranks:
            ranks.send(number)
        told = [ranks.recv() for ranks in self._ranks]
        cpu, moved = self._ask_server()
        [concluding] = [seconds for *_, each in told for seconds in each]
        return {
            "seconds": max(end for end, *_ in told) - started,
            "server_CPU_ms": 1000 * (cpu - cpu_before),
            "concluding_CPU_ms": 1000 * concluding,
            "rank_CPU_ms": 1000 * sum(cpu for _, cpu, *_ in told) / self._size,
            "requests_a_rank": sum(requests for *_, requests, _ in told) / self._size,
            "bytes_a_rank": (moved - bytes_before) / self._size,
        }

    def end(self) -> None:
        """Let all processes go."""
        for pipe in [*self._ranks, self._server]:
            pipe.send(0)

    def _ask_server(self) -> tuple[float, int]:
        self._server.send(1)
        return self._server.recv()


def start(target: Any, *args: Any) -> Connection:
    """Start a process, and return a pipe to it."""
    ours, theirs = _context.Pipe()
    _context.Process(target=target, args=(theirs, *args), daemon=True).start()
    theirs.close()
    return ours


def main() -> None:
    """Measure for each number of ranks."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    arguments.add_argument("--groups", type=int, default=64, help="groups of each rank")
    options = arguments.parse_args()
    sheet = Sheet("rollcall", "none")
    with tempfile.TemporaryDirectory() as folder:
        no_names = Path(folder) / "no_names.so"
        source = Path(__file__).with_name("no_names.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(no_names), str(source), "-ldl"], check=True)
        os.environ["LD_PRELOAD"] = str(no_names)
        _context.set_forkserver_preload(["torch", "torch.distributed", "gpurelease"])
        for size in options.ranks:
            simulation = Simulation(size, options.groups)
            first, *later = [simulation.roll_call(number) for number in range(1, LATER + 2)]
            simulation.end()
            for which, taken in (("first", [first]), ("later", later)):
                numbers = {field: spread(each[field] for each in taken) for field in first}
                sheet.row(roll_call=which, ranks=size, **numbers)
    sheet.write(options.json)


if __name__ == "__main__":
    main()
