"""What one rank holds, now and over time."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import NamedTuple

import torch

from gpurelease import is_released

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
    """One sample.

    Attributes:
        seconds: When, by the system's monotonic clock.
        released: Whether the world was released then, or on its way there or back.
        usage: What the rank held.
    """

    seconds: float
    released: bool
    usage: Usage


class Meter:
    """Tells what this rank holds, and takes samples of it from a thread.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[Sample] = []
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def usage(self) -> Usage:
        """Return what this rank holds now."""
        device_bytes = None
        if self._device.type != "cpu":
            free, total = torch.cuda.mem_get_info(self._device)
            device_bytes = total - free
        with self._looking:  # one thread at a time, since listing a folder takes a descriptor itself
            descriptors = len(os.listdir("/proc/self/fd")) - 1
            return Usage(descriptors, len(os.listdir("/proc/self/task")) - 1, device_bytes)

    def take_samples(self) -> list[Sample]:
        """Return the samples since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD):
            self._samples.append(Sample(time.monotonic(), is_released(), self.usage()))
