"""The command: episodes of one seed, one after the other, until the time is up or something is not as it should be."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.soak.events import Event, Scope, trouble_of
from tests.soak.generator import generate
from tests.soak.rank import BEGIN, END, run_episode

EPISODE_SECONDS = 600.0  # after which an episode hangs: it usually takes ten to sixty


@dataclass
class Soak:
    """What a run is made of, and what came of it.

    Attributes:
        failure: What went wrong, with the command that replays it; or empty.
        episodes, events, kinds: How many were run: events and kinds of rank 0.
    """

    seed: int
    backend: str = "gloo"
    size: int = 4
    events_each: int = 30
    failure: str = ""
    episodes: int = 0
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float, runner: Callable[..., list[Any]] = run_ranks, *, first: int = 0) -> bool:
        """Run episodes for a time, to the end of the last one, and return whether all was well.

        Args:
            seconds: How long.
            runner: ``tests.ranks.run_ranks``, or what runs ranks on another machine.
            first: Number of the first episode.
        """
        end = time.monotonic() + seconds
        for number in count(first):
            if not self.episode(number, runner):
                return False
            if time.monotonic() >= end:
                return True
        return True

    def episode(self, number: int, runner: Callable[..., list[Any]] = run_ranks) -> bool:
        """Run one episode, and return whether all was well."""
        episode = generate(self.seed, number, self.size, self.backend, self.events_each)
        dies = {trouble.rank for event in episode.events for trouble in trouble_of(event) if trouble.what == "dies"}
        try:
            numbers = runner(
                run_episode,
                self.size,
                timeout=EPISODE_SECONDS,
                env={"TORCH_DIST_USE_NCCL2": "0"},  # the model is that of the first ProcessGroupNCCL
                dies=dict.fromkeys(dies, -signal.SIGKILL),
                episode=episode,
                backend=self.backend,
            )
        except AssertionError as error:
            self.failure = self._describe(number, str(error))
            return False
        self.episodes += 1
        self.events += max(found for found in numbers if found is not None)
        self.kinds.update(kind for event in episode.events for kind in kinds(event))
        return True

    def _describe(self, number: int, words: str) -> str:
        told = re.findall(rf"{BEGIN} (\d+\.\d+)\n(.*?){END}", words, re.DOTALL)
        log = Path(tempfile.gettempdir()) / f"soak-{self.backend}-{self.seed}-{number}.log"
        log.write_text(words)
        lines = [f"seed {self.seed}, episode {number}, {self.backend}, {self.size} ranks:"]
        # The first to speak is the one to listen to: the others miss it.
        lines += [text.rstrip() for _, text in sorted(told)[:2]] or [words[:3000]]
        options = f"--seed {self.seed} --backend {self.backend} --ranks {self.size} --events {self.events_each}"
        lines += [f"all ranks' words: {log}", f"again: python -m tests.soak {options} --episode {number}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(self.kinds.items()))
        return f"seed {self.seed}, {self.backend}: {self.episodes} episodes, {self.events} events ({kinds})"


def kinds(event: Event) -> list[str]:
    """Return what happens in an event, in one word each."""
    if not isinstance(event, Scope):
        return [type(event).__name__]
    found = [
        event.how,
        *(f"{trouble.what} at {trouble.step}" for trouble in (event.on_entry, event.on_exit) if trouble),
    ]
    if event.raises:
        found.append(f"body: {event.raises.what}")
    return found + [kind for inner in event.body for kind in kinds(inner)]


@contextmanager
def _runner(backend: str) -> Iterator[Callable[..., list[Any]]]:
    """Give what runs ranks on the machine for ``backend``."""
    if backend == "gloo":
        yield run_ranks
        return
    from tests.nccl.build import build, double_ranks, preloaded

    with tempfile.TemporaryDirectory(prefix="simgpu-") as folder:
        out = Path(folder)
        build(out)
        with preloaded(out), double_ranks("soak", out) as runner:
            yield runner


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (60)")
    parser.add_argument("--seed", type=int, default=1, help="what happens (1)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on its double, without a GPU"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (4)")
    parser.add_argument("--events", type=int, default=30, help="events per episode (30)")
    parser.add_argument("--episode", type=int, help="run only this one")
    parser.add_argument("--first", type=int, default=0, help="begin with this episode")
    parser.add_argument("--show", action="store_true", help="print the events of --episode, and run nothing")
    chosen = parser.parse_args()
    if chosen.show:
        episode = generate(chosen.seed, chosen.episode or 0, chosen.ranks, chosen.backend, chosen.events)
        print(*episode.events, sep="\n")
        return 0
    soak = Soak(chosen.seed, chosen.backend, chosen.ranks, chosen.events)
    with _runner(chosen.backend) as runner:
        if chosen.episode is not None:
            good = soak.episode(chosen.episode, runner)
        else:
            good = soak.run(chosen.seconds, runner, first=chosen.first)
    print(soak)
    print("all was well" if good else soak.failure)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
