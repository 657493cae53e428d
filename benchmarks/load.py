"""Load on one, two and four real ComfyUIs behind the front door: throughput, latency, utilisation, growth, latents.

    python benchmarks/load.py [--instances 1,2,4] [--prompts 1000] [--ranks 2] [--alternate] [--json]

The demo model and two changed copies run in three sizes. 5 % of the prompts are cancelled, and three programs for each
ComfyUI send them. Each latent is compared with that of one device. `growth_mib`: memory growth of all processes from
the middle third of the prompts to the last third. Memory and descriptors that do not level off are printed, descriptors
by kind; they make the exit status 1, as do lost and wrong prompts. `--alternate`: each prompt uses another model than
the one before, and ComfyUI keeps no model for it (--cache-classic); with --prompts 500 this is the soak of hot swaps.
Without haproxy, programs talk to the ComfyUIs directly.

1,000 prompts with two ranks take about ten minutes on two cores, for each number of instances.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from adversaries.soak import Usage
from load_test.farm import NAMES, farm
from load_test.mix import ALL, Order, orders
from load_test.programs import Tally, references, run_all
from load_test.readings import grown_mib, leaks, percentile
from subject import finish, make_parser

from parallel_backend.errors import ParallelError

PROGRAMS = 3  # for each ComfyUI, so that prompts wait
READINGS = 30  # of memory and descriptors, in a run
# Options of ComfyUI's cache: its default keeps every node's output until memory is short, which looks like a leak.
CACHE, ALTERNATE_CACHE = ["--cache-lru", "10"], ["--cache-classic"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--instances", default="1,2,4", help="numbers of ComfyUIs, with commas between")
    parser.add_argument("--prompts", type=int, default=1000, help="for each number of instances")
    parser.add_argument("--ranks", type=int, default=2, help="of each ComfyUI, on the CPU")
    parser.add_argument("--alternate", action="store_true", help="another model with each prompt")
    args = parser.parse_args()
    counts = [int(count) for count in args.instances.split(",")]
    if not all(1 <= count <= len(NAMES) for count in counts) or args.prompts < 1:
        parser.error(f"--instances are numbers from 1 to {len(NAMES)}, --prompts is at least 1")

    wanted = orders(args.prompts, alternate=args.alternate)
    known: dict = {}
    result = {"prompts": 0, "lost": 0, "wrong": 0, "growth_mib": 0.0, "p95_s": {}}
    grown: list[str] = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            cache = ALTERNATE_CACHE if args.alternate else CACHE
            tally, seen, loads, behind = _measure(Path(folder), count, wanted, args.ranks, cache, known)
        _print(count, tally, seen, loads, behind)
        grown += leaks(seen)
        result["prompts"] += len(wanted)
        result["lost"] += len(tally.lost)
        result["wrong"] += len(tally.wrong)
        result["growth_mib"] = round(max(result["growth_mib"], grown_mib(seen)), 1)
        result["p95_s"][str(count)] = round(percentile(tally.seconds, 0.95), 2)
    for words in grown:
        print(f"grows: {words}")
    finish(result, args.json)
    if grown or result["lost"] or result["wrong"]:
        sys.exit(1)


def _measure(
    folder: Path, count: int, wanted: list[Order], ranks: int, cache: list[str], known: dict
) -> tuple[Tally, dict[str, list[Usage]], tuple[int, int], bool]:
    """Returns (tally of the prompts, readings by process, loads, True behind the front door) of `count` instances."""
    seen: dict[str, list[Usage]] = {}
    every = max(1, len(wanted) // READINGS)
    with farm(folder, count, cache) as running:
        if not known:
            known |= asyncio.run(references(running, ALL, ranks=1))

        def passed(done: int) -> None:
            if done % every == 0:
                for name, usage in running.usages().items():
                    seen.setdefault(name, []).append(usage)

        asyncio.run(run_all(running, wanted[: 4 * count], known, ranks, 2 * count))  # loads the models
        before = running.loads()
        tally = asyncio.run(run_all(running, wanted, known, ranks, PROGRAMS * count, passed))
        after = running.loads()
        return tally, seen, (after[0] - before[0], after[1] - before[1]), running.door is not None


def _print(
    count: int, tally: Tally, seen: dict[str, list[Usage]], loads: tuple[int, int], behind: bool
) -> None:
    ends = ", ".join(f"{number} {end}" for end, number in sorted(tally.ends.items()))
    ends += "".join(f", {number} x {answer}" for answer, number in sorted(tally.answers.items()))
    seconds = tally.seconds
    print(
        f"{count} instance(s) {'behind the front door' if behind else 'without haproxy'}: {ends}; "
        f"{len(tally.wrong)} wrong; {tally.ends.total() / tally.wall:.2f} prompts/s, "
        f"p50 {percentile(seconds, 0.5):.2f} s, p95 {percentile(seconds, 0.95):.2f} s, "
        f"utilisation {tally.busy / tally.wall / count:.0%}; {loads[0]} loads while a prompt waited, {loads[1]} ahead; "
        f"growth {grown_mib(seen):+.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except (ParallelError, RuntimeError) as error:
        sys.exit(str(error))
