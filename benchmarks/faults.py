"""Provokes and times, case by case, the failures for which docs/reliability.md makes a promise.

    python benchmarks/faults.py [--only 2,6] [--jobs 1000] [--inputs 20000] [--json]

Each case starts its own ranks (two on the CPU), injects its fault, and then checks that the next job gives the same
bits as an earlier one. A check passes if its value is at most its limit. Limits in seconds are for a quiet machine:
they are multiplied by how much slower a process that runs during the case is than on a quiet machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from fault_cases import CASES, Subject, true
from fault_cases.pace import measured_pace
from subject import finish, make_parser, random_flux

from scripted import ranks_of


def _place(number: str) -> tuple[int, str]:
    """Returns a sort key: cases with numbers in their order, then cases with names."""
    first = number.partition("-")[0]
    return (int(first), "") if first.isdigit() else (len(CASES), number)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="cases, by their numbers, with commas between")
    parser.add_argument("--jobs", type=int, default=1000, help="of case 15")
    parser.add_argument("--inputs", type=int, default=20_000, help="of case 16")
    args = parser.parse_args()
    chosen = [number for number in args.only.split(",") if number] or sorted(CASES, key=_place)
    unknown = [number for number in chosen if number not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {', '.join(sorted(CASES, key=_place))}")
    results = {}
    with (
        random_flux(heads=2, double_blocks=1, single_blocks=1) as flux,
        tempfile.TemporaryDirectory() as folder,
        measured_pace() as pace,
    ):
        subject = Subject(flux, Path(folder), args.jobs, args.inputs)
        for number in chosen:
            title, run = CASES[number]
            before = (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")))  # noqa: PTH208
            pace.reset()
            checks = list(run(subject))
            slowness = pace.slowness
            after = (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")))  # noqa: PTH208
            if results:  # the first case also starts the supervisor, which stays
                checks.append(true("descriptors and /dev/shm as before", after == before))
            checks.append(true("no rank left", not ranks_of(os.getpid())))
            passed = all(check.passes(slowness) for check in checks)
            results[number] = {
                "title": title,
                "passed": passed,
                "slowness": round(slowness, 2),
                "checks": [asdict(check) | {"passed": check.passes(slowness)} for check in checks],
            }
            print(
                f"{number:>6}  {'pass' if passed else 'FAIL'}  {title} (slowness {slowness:.1f})", flush=True
            )
            for check in checks:
                limit = "" if check.limit is None else f"  (limit {check.limit:g})"
                if check.limit != 0 or not check.passes(slowness):
                    print(
                        f"{'':14}{'' if check.passes(slowness) else 'FAIL '}{check.what}: {check.value:.3g}{limit}",
                        flush=True,
                    )
    finish({"cases": results, "passed": all(entry["passed"] for entry in results.values())}, args.json)
    if not all(entry["passed"] for entry in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
