"""How long a cycle takes, against what people do without gpurelease: destroy everything and initialise it again.

    python -m benchmarks.cycle [--ranks 8] [--rounds 7] [--json FILE]

Both go on in turns in the same processes, from the step before to the first use of every group, for the slowest rank.
The other way also breaks every handle that anybody holds, which no number shows. CPU seconds are those of a rank, on
all its threads: they are quieter than seconds where ranks share cores.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch.distributed as dist

from benchmarks.double import communicators_take, init, make_groups, ranks_on_double, use
from benchmarks.sheet import Sheet, parser
from benchmarks.timing import over_ranks, seconds_by_step, timed
from gpurelease import released_world

WAYS = ("torch", "rebuild", "suspend")


def measure(rank: int, size: int, eager: bool, seconds_each: float, rounds: int) -> list[dict[str, Any]]:
    """Go through rounds of all ways, and return what each took this rank."""
    groups: list[Any] = []

    def by_hand(number: int) -> dict[str, float]:
        start = time.perf_counter()
        groups.clear()
        dist.destroy_process_group()
        destroyed = time.perf_counter()
        init(rank, size, f"round-{number}", eager=eager)
        groups.extend(make_groups(rank, size))
        made = time.perf_counter()
        use(groups)
        return {"destroy": destroyed - start, "init": made - destroyed, "first use": time.perf_counter() - made}

    def scope(strategy: str) -> dict[str, float]:
        with released_world(strategy=strategy, timeout=60) as opened:
            pass
        start = time.perf_counter()
        use(groups)
        return {**seconds_by_step(opened.report), "first use": time.perf_counter() - start}

    init(rank, size, eager=eager)
    groups.extend(make_groups(rank, size))
    use(groups)
    communicators_take(seconds_each)
    taken = []
    for number in range(rounds):
        each = {"torch": timed(lambda number=number: by_hand(number))}
        scope("rebuild")  # builds the Gloo that stands in for a new WORLD: it is paid once a job
        each.update({strategy: timed(lambda strategy=strategy: scope(strategy)) for strategy in WAYS[1:]})
        taken.append(each)
    return taken


def main() -> None:
    """Measure with each time for a communicator, in lazy and in eager worlds."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    sheet = Sheet("cycle", "double")
    with ranks_on_double() as run:
        for seconds_each, eager in itertools.product((0.0, 0.03, 0.1), (False, True)):
            how = {"eager": eager, "seconds_each": seconds_each, "rounds": options.rounds}
            by_rank = run(measure, options.ranks, timeout=300, **how)
            by_hand = 0.0
            for way in WAYS:
                took = over_ranks([[taken[way] for taken in ranks] for ranks in zip(*by_rank, strict=True)])
                by_hand = by_hand or took["seconds"]["median"]
                sheet.row(
                    way=way,
                    world="eager" if eager else "lazy",
                    ms_each=round(1000 * seconds_each),
                    of_torch=took["seconds"]["median"] / by_hand,
                    **took,
                )
    sheet.write(options.json)


if __name__ == "__main__":
    main()
