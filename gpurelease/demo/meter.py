"""What one rank holds, over time, and what gpurelease did meanwhile."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import NamedTuple

import torch

from gpurelease import Transition

PERIOD = 0.02  # seconds between two samples


class Usage(NamedTuple):
    """What a rank holds at one moment.

    Attributes:
        descriptors: Open file descriptors.
        threads: Threads, but for the meter's own.
        device_bytes: Bytes in use on its device, as the device itself counts them, or None without a device.
    """

    descriptors: int
    threads: int
    device_bytes: int | None

    @property
    def figures(self) -> dict[str, float]:
        """What is worth showing, by name: with a device what is held there, else what stands for it."""
        if self.device_bytes is not None:
            return {"device MiB": self.device_bytes / 2**20}
        return {"descriptors": self.descriptors, "threads": self.threads}


class Sample(NamedTuple):
    """Usage at a moment, in seconds of the system's monotonic clock."""

    seconds: float
    usage: Usage


class Change(NamedTuple):
    """A transition of the world that has just ended, and what the rank held then."""

    transition: Transition
    seconds: float
    usage: Usage


class Meter(logging.Handler):
    """Samples this rank's usage from a thread, and hears of each transition through the log.

    The log, since a decorated function has no scope at hand whose report could be read.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(logging.INFO)
        self._device = device
        self._samples: list[Sample] = []
        self._changes: list[Change] = []
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        logger = logging.getLogger("gpurelease.world")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        logging.getLogger("gpurelease.world").removeHandler(self)

    def usage(self) -> Usage:
        """Return what this rank holds now."""
        device_bytes = None
        if self._device.type != "cpu":
            free, total = torch.cuda.mem_get_info(self._device)
            device_bytes = total - free
        with self._looking:  # one thread at a time, since listing a folder takes a descriptor itself
            descriptors = len(os.listdir("/proc/self/fd")) - 1
            return Usage(descriptors, len(os.listdir("/proc/self/task")) - 1, device_bytes)

    def take(self) -> tuple[list[Sample], list[Change]]:
        """Return the samples and changes since the last call."""
        samples, self._samples = self._samples, []
        changes, self._changes = self._changes, []
        return samples, changes

    def emit(self, record: logging.LogRecord) -> None:
        """Note a transition that gpurelease logs."""
        for argument in record.args or ():
            if isinstance(argument, Transition):
                self._changes.append(Change(argument, time.monotonic(), self.usage()))

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD):
            self._samples.append(Sample(time.monotonic(), self.usage()))
