"""The command: episodes of one seed, one after the other, until the time is up or something is not as it should be."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.soak.events import Event, Scope, draw
from tests.soak.machines import runner
from tests.soak.rank import run_episode

EPISODE_SECONDS = 400.0  # after which an episode hangs: it usually takes ten to sixty


@dataclass
class Soak:
    """What a run is made of, and what came of it.

    Attributes:
        failure: What went wrong, with the command that does it again; or empty.
        episodes, events, kinds: How many were done.
    """

    seed: int
    backend: str = "gloo"
    size: int = 3
    events_each: int = 12
    failure: str = ""
    episodes: int = 0
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float, run: Callable[..., list[Any]] = run_ranks, *, first: int = 0) -> bool:
        """Run episodes for a time, to the end of the last one, and return whether all was well.

        Args:
            seconds: How long.
            run: ``tests.ranks.run_ranks``, or what runs ranks on another machine.
            first: Number of the first episode.
        """
        end = time.monotonic() + seconds
        for number in count(first):
            if not self.episode(number, run):
                return False
            if time.monotonic() >= end:
                return True
        return True

    def episode(self, number: int, run: Callable[..., list[Any]] = run_ranks) -> bool:
        """Run one episode, and return whether all was well."""
        events = draw(self.seed, number, self.size, self.backend, self.events_each)
        troubles = [event.trouble for event in events if isinstance(event, Scope) and event.trouble]
        dies = {trouble.rank: -signal.SIGKILL for trouble in troubles if trouble.what == "dies"}
        try:
            run(run_episode, self.size, timeout=EPISODE_SECONDS, dies=dies, events=events, backend=self.backend)
        except AssertionError as error:
            log = Path(tempfile.gettempdir()) / f"soak-{self.backend}-{self.seed}-{number}.log"
            log.write_text(str(error))
            options = f"--seed {self.seed} --backend {self.backend} --ranks {self.size} --events {self.events_each}"
            self.failure = f"{error}\n\nall that is in {log}\nagain: python -m tests.soak {options} --episode {number}"
            return False
        self.episodes += 1
        self.events += len(events)
        self.kinds.update(kind for event in events for kind in kinds(event))
        return True

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(self.kinds.items()))
        return f"seed {self.seed}, {self.backend}: {self.episodes} episodes, {self.events} events ({kinds})"


def kinds(event: Event) -> list[str]:
    """Return what happens in an event, in a few words."""
    if not isinstance(event, Scope):
        return [type(event).__name__]
    trouble = event.trouble
    return [event.how, *([f"{trouble.what} at {trouble.where}"] if trouble else []), *filter(None, [event.inner])]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (60)")
    parser.add_argument("--seed", type=int, default=1, help="what happens (1)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on its double, without a GPU"
    )
    parser.add_argument("--ranks", type=int, default=3, help="processes (3)")
    parser.add_argument("--events", type=int, default=12, help="events per episode (12)")
    parser.add_argument("--episode", type=int, help="run only this one")
    parser.add_argument("--first", type=int, default=0, help="begin with this episode")
    parser.add_argument("--show", action="store_true", help="print the events of --episode, and run nothing")
    chosen = parser.parse_args()
    if chosen.show:
        print(*draw(chosen.seed, chosen.episode or 0, chosen.ranks, chosen.backend, chosen.events), sep="\n")
        return 0
    soak = Soak(chosen.seed, chosen.backend, chosen.ranks, chosen.events)
    with runner(chosen.backend) as run:
        if chosen.episode is not None:
            good = soak.episode(chosen.episode, run)
        else:
            good = soak.run(chosen.seconds, run, first=chosen.first)
    print(soak)
    print("all was well" if good else soak.failure)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
