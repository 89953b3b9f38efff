"""Run one function on several real ranks, with a hard time limit and all ranks' stacks when it is passed.

Ranks are forked from a server that has imported torch once, since four processes that import it for themselves take
seconds on two cores. A function that runs on ranks must be at the top level of a test module.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore

LONG_ENOUGH_FOR_STACKS = 2.0  # seconds

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.fsdp", "gpurelease"])


def run_ranks(
    function: Callable[..., Any],
    size: int = 4,
    *,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    dies: Mapping[int, int] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(rank, size, **kwargs)`` in ``size`` processes and return what it returned, by rank.

    WORLD is not initialised; :func:`init_gloo` does it.

    Args:
        function: A function at the top level of a module.
        size: Number of ranks.
        timeout: Seconds after which the test fails with all ranks' stacks.
        env: Environment variables of the ranks.
        dies: The exit codes of ranks that are expected to end without returning (``{2: -signal.SIGKILL}``); what
            they return is None.
        **kwargs: Passed on.

    Raises:
        AssertionError: A rank raised, ended too early, or was not done in time; with the words of all ranks.
    """
    dies = dies or {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        where = Path(folder)
        processes = [
            _context.Process(target=_run, args=(function, rank, size, where, dict(env or {}), kwargs), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for rank in late:
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
        if late:
            time.sleep(LONG_ENOUGH_FOR_STACKS)
        for rank in late:
            processes[rank].kill()
            processes[rank].join()
        results = [_result(where, rank) for rank in range(size)]
        wrong = []
        for rank, process in enumerate(processes):
            if rank in late:
                wrong.append(f"rank {rank} was not done within {timeout:g} s")
            elif process.exitcode != dies.get(rank, 0):
                wrong.append(f"rank {rank} ended with exit code {process.exitcode}")
        if wrong:
            words = [f"---- rank {rank} said:\n{_words(where, rank)}" for rank in range(size)]
            raise AssertionError("\n".join([*wrong, *words]))
        return results


def init_gloo(rank: int, size: int, **options: Any) -> Store:
    """Initialise WORLD on Gloo over a TCPStore on a free port of rank 0, and return the store."""
    store = tcp_store(rank, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, **options)
    return store


def tcp_store(rank: int, size: int, name: str = "port") -> TCPStore:
    """Return a TCPStore that rank 0 serves on a port that the system picks."""
    meeting = FileStore(str(Path(os.environ["RANKS_FOLDER"]) / name), size)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(meeting.get("port")), size, is_master=False, wait_for_workers=False)


def logged(level: int) -> list[tuple[str, str, str]]:
    """Return a list that gets all lines of ours from now on: level, name of the logger, text."""
    lines: list[tuple[str, str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.name, record.getMessage()))
    logging.getLogger("gpurelease").addHandler(handler)
    logging.getLogger("gpurelease").setLevel(level)
    return lines


def descriptors() -> int:
    """Return how many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # one is listdir's own


def threads() -> int:
    """Return how many threads this process has, but for those on their way out: a joined one may take a moment."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    return min(counts)


def _run(
    function: Callable[..., Any], rank: int, size: int, where: Path, env: dict[str, str], kwargs: dict[str, Any]
) -> None:
    out = open(where / f"{rank}.out", "w", buffering=1)  # noqa: SIM115 - open as long as the process
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    faulthandler.enable(file=out, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=out, all_threads=True)
    os.environ.update(env, RANKS_FOLDER=str(where), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    # Whom a rank waits for on a slow machine is written to its output only: tests look at all other lines of the log.
    waiting = logging.getLogger("gpurelease.agreement.telling")
    waiting.propagate = False
    waiting.addHandler(logging.StreamHandler(out))
    dist.set_debug_level_from_env()
    code = 0
    try:
        result = function(rank, size, **kwargs)
        (where / f"{rank}.result").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()), flush=True)
        code = 1
    # Not by way of the interpreter's end: a backend's thread may wait there for a rank that has failed.
    os._exit(code)


def _words(where: Path, rank: int) -> str:
    path = where / f"{rank}.out"
    return path.read_text() if path.exists() else "nothing: it never began"


def _result(where: Path, rank: int) -> Any:
    path = where / f"{rank}.result"
    return pickle.loads(path.read_bytes()) if path.exists() else None
