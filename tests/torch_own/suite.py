"""torch's own ``DistributedTest`` over Gloo, as it is or with a cycle after each group that is made.

    WORLD_SIZE=3 python -m tests.torch_own.suite [--cycles] [--sample COUNT] [NAME ...]

It prints one line per test, as JSON. It is set up as torch's ``test/distributed/test_distributed_spawn.py`` is, but
that ranks are forked: to import torch anew in each of them would take longer than most of the tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

# torch's module reads the environment when it is imported.
_folder = tempfile.TemporaryDirectory(prefix="torch-own-")
os.environ.update(BACKEND="gloo", TEMP_DIR=_folder.name, INIT_METHOD=f"file://{_folder.name}/init")

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

from tests.cycles import cycle  # noqa: E402

CYCLES = Path(_folder.name) / "cycles"  # a byte for each that rank 0 has gone through in a test
SEED = 8


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    """The tests, each of which forks its ranks."""

    with_cycles = False
    exit_codes: Sequence[int] = ()

    def setUp(self) -> None:
        """Fork the ranks."""
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        self.exit_codes = [process.exitcode for process in self.processes]
        super()._check_return_codes(fn, elapsed_time)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        with cycle_after_making_groups() if cls.with_cycles else contextlib.nullcontext():
            super()._run(rank, test_name, file_name, parent_pipe, **kwargs)


@contextlib.contextmanager
def cycle_after_making_groups() -> Iterator[None]:
    """Have a cycle after each call that makes a group, torch's own calls included: here all ranks make them."""
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_and_cycle(*args: Any, **options: Any) -> None:
        init_process_group(*args, **options)
        go_through_one()

    def new_group_and_cycle(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        go_through_one(*([group] if isinstance(group, dist.ProcessGroup) else []))
        return group

    with contextlib.ExitStack() as patches:
        for module in (dist, distributed_c10d):
            patches.enter_context(mock.patch.object(module, "init_process_group", init_and_cycle))
            patches.enter_context(mock.patch.object(module, "new_group", new_group_and_cycle))
        yield


def go_through_one(*groups: dist.ProcessGroup) -> None:
    """Release and restore the world."""
    with cycle(dist.group.WORLD, *groups):
        pass
    if dist.get_rank() == 0:
        with CYCLES.open("ab") as file:
            file.write(b".")


class Printer(unittest.TestResult):
    """Prints what becomes of each test as soon as it is known.

    Args:
        out: Where.

    Attributes:
        were_run: How many were not skipped.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self.were_run = 0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Begin to count its cycles."""
        super().startTest(test)
        CYCLES.write_bytes(b"")

    def addSuccess(self, test: Suite) -> None:  # noqa: N802
        """Print it. torch looks at rank 0's exit code only."""
        ended_badly = any(test.exit_codes)
        self._print(test, f"passed, with exit codes {test.exit_codes}" if ended_badly else "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        """Print it."""
        self._print(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        """Print it."""
        self._print(test, "failed", self._exc_info_to_string(err, test))

    addFailure = addError  # noqa: N815

    def _print(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        self.were_run += outcome != "skipped"
        name = test.id().rpartition(".")[2]
        print(json.dumps([name, outcome, why, CYCLES.stat().st_size]), file=self._out, flush=True)


def main() -> None:
    """Run the tests that are named, or all, or some of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", action="store_true", help="with a cycle after each group that is made")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="stop when so many were not skipped")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    Suite.with_cycles = options.cycles
    names = options.names or unittest.TestLoader().getTestCaseNames(Suite)
    if options.sample:
        random.Random(SEED).shuffle(names)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # the tests print too
        printer = Printer(out)
        for name in names:
            if printer.were_run != options.sample:
                Suite(name).run(printer)


if __name__ == "__main__":
    main()
