"""Starts the ranks, hears from them, and ends them all when one of them fails or all fall silent."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Generator
from multiprocessing.connection import Connection, wait

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, spawn

from gpurelease.demo.rank import Job, run_rank
from gpurelease.demo.record import Step

PATIENCE = 120.0  # seconds without news; the ranks' own time-outs are shorter, and say more
GRACE = 1.0  # seconds for a rank to end by itself, and again before it is killed


class JobFailed(Exception):
    """The job did not come to its end. All its processes have ended."""


def run_job(job: Job) -> Generator[Step, None, None]:
    """Run the job in processes of its own, and yield each step when it is done.

    The processes end with the generator, however that ends.

    Raises:
        JobFailed: A rank raised, was killed, or hung.
    """
    # It would say of every process that it ends it.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # The launcher holds the store, so that it outlives every rank; the system picks the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    ranks = spawn(run_rank, (job, store.port, sender), job.ranks, join=False, daemon=True)
    sender.close()
    try:
        for _ in range(job.steps):
            yield _next_step(ranks, receiver)
        _wait_for_the_end(ranks)
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise JobFailed(f"rank {error.error_index} ended with {how}; the other ranks were ended") from None
    except ProcessRaisedException as error:
        raise JobFailed(f"rank {error.error_index} failed; the other ranks were ended{error}") from None
    finally:
        _end(ranks)


def _next_step(ranks: ProcessContext, receiver: Connection) -> Step:
    while receiver not in (news := wait([receiver, *ranks.sentinels], PATIENCE)):
        if not news:
            raise JobFailed(f"nothing was heard of any rank for {PATIENCE:g} s; all were ended")
        ranks.join(0, GRACE)  # raises if it is a failure that a rank ended with
    try:
        step: Step = receiver.recv()
    except EOFError:
        ranks.join(GRACE, GRACE)
        raise JobFailed("rank 0 ended before the job was done; the other ranks were ended") from None
    return step


def _wait_for_the_end(ranks: ProcessContext) -> None:
    while left := len(ranks.sentinels):
        ranks.join(PATIENCE, GRACE)
        if len(ranks.sentinels) == left:
            raise JobFailed(f"the job was done, but {left} ranks did not end within {PATIENCE:g} s; they were ended")


def _end(ranks: ProcessContext) -> None:
    for process in ranks.processes:
        process.terminate()
    for process in ranks.processes:
        process.join(GRACE)
        process.kill()
        process.join()
