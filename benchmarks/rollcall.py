"""How long a roll call takes with many ranks, which are threads of one process here, over one TCPStore.

    python benchmarks/rollcall.py [--ranks 8 64 256] [--groups 40]

Threads share one interpreter, so this is an upper bound; what to read off it is how the time grows with the ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore

from gpurelease.agreement.rollcall import RollCall
from gpurelease.agreement.verdicts import conclude
from gpurelease.torch_internals.stores import client_of


def main() -> None:
    """Measure for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--groups", type=int, default=40, help="groups that each rank lists in its answer")
    options = parser.parse_args()
    print(" ranks   first roll call   later ones (median)")
    for size in options.ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        roll_calls = [RollCall(lambda store=store: client_of(store), rank, size) for rank in range(size)]
        answer = {
            "phase": "armed",
            "generation": 0,
            "wants": "released",
            "problem": "",
            "strategy": "rebuild",
            "backends": None,
            "groups": {f"{number:016x}": [size, True, ""] for number in range(options.groups)},
            "unmatched": [],
            "world": f"{0:016x}",
            "stand-in": "one",
            "contexts": False,
        }
        seconds = []
        with ThreadPoolExecutor(size) as pool:
            for _ in range(6):
                start = time.perf_counter()
                calls = [pool.submit(roll_call.call, answer, conclude, 60.0) for roll_call in roll_calls]
                verdicts = [call.result() for call in calls]
                seconds.append(time.perf_counter() - start)
                assert all(verdict["do"] == "release" and not verdict["kept"] for verdict in verdicts)
        print(f"{size:6d}   {seconds[0]:13.3f} s   {statistics.median(seconds[1:]):17.3f} s", flush=True)


if __name__ == "__main__":
    main()
