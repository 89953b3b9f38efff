"""``python -m gpurelease.demo``: runs the job, and shows what it did."""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from gpurelease.demo.launcher import JobFailed, run_job
from gpurelease.demo.picture import draw
from gpurelease.demo.rank import Job
from gpurelease.demo.record import Step
from gpurelease.demo.rollout import BACKEND
from gpurelease.demo.table import progress, summary, table
from gpurelease.demo.task import LENGTH

INTERRUPTED = 130  # the exit code that a shell gives to what Ctrl-C has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit code."""
    options = parse(arguments)
    job = Job(options.processes, options.steps, options.seed)
    poses = "" if BACKEND == "nccl" else ", which poses as the backend to release, for want of GPUs"
    print(f"{job.ranks} processes learn to sort {LENGTH} digits, over {BACKEND}{poses}.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps: list[Step] = []
    try:
        with closing(run_job(job)) as done:
            for step in done:
                print(progress(step, job.steps), flush=True)
                steps.append(step)
    except JobFailed as failure:
        print(f"gpurelease.demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpurelease.demo: interrupted; all processes were ended", file=sys.stderr)
        return INTERRUPTED
    print("", table(steps), "", summary(steps), sep="\n")
    try:
        draw(steps, options.picture)
    except ImportError:
        print("There is no picture, since matplotlib is not installed.")
    else:
        print(f"The picture of it is {options.picture.resolve()}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; end the process with a word of help if it makes no sense."""
    gpus = torch.cuda.device_count()
    most = gpus if BACKEND == "nccl" else 16
    parser = argparse.ArgumentParser(
        prog="python -m gpurelease.demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Train a small policy to sort digits with GRPO, on FSDP2 and tensor parallelism, in processes that this
            command starts and ends. Every rollout runs inside @releases_world, and its weight sync inside
            restored_world(). With two GPUs or more the groups are NCCL's, with a GPU for each process; else Gloo
            poses as the backend to release, on the CPU, which takes about a minute on two cores.

            Shows a line for each step, then a table of all: the mean reward, the groups released, the seconds that
            releasing and restoring took together in the step, and what rank 0 held before the rollout, inside it
            and after it: descriptors and threads, or on GPUs the device's memory in use."""
        ),
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="rollouts and updates (default 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides policy and prompts (default 0)")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(4, most),
        metavar="N",
        help=f"ranks, from 2 to {most} on this machine (default %(default)s)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("gpurelease-demo.png"),
        metavar="PATH",
        help="where to write reward and resource use over time, as a PNG (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps takes 1 or more")
    if not 2 <= options.processes <= most:
        parser.error(f"--processes takes 2 to {most} on this machine")
    if not options.picture.resolve().parent.is_dir():
        parser.error(f"--picture: there is no folder {options.picture.resolve().parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
