"""Counts failures under hostile and odd inputs: fuzzed prompts, random jobs, random kills, odd environments, damaged
model files and a soak of mixed prompts, from fixed seeds.

    python benchmarks/adversary.py [--only prompts,jobs] [--scale 0.1] [--json]

Prompts go to the real ComfyUI (scripts/environment.py installs one). Every number except `prompts` should be 0.
Findings are printed as they occur. A run takes a quarter of an hour on two cores; `--scale` runs a part of it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from adversaries.environments import run_in_each
from adversaries.findings import Findings
from adversaries.headers import fuzz_headers
from adversaries.jobs import compare_strategies, kill_at_random
from adversaries.prompts import fuzz_prompts
from adversaries.soak import soak
from subject import ROOT, finish, make_parser, random_flux

from comfy_harness import Comfy, start_comfyui
from scripted import scripted_weights

PROMPTS, JOBS, KILLS, ROUNDS, HEADERS = 1000, 72, 30, 27, 20_000  # at scale 1
PACKS = ROOT / "tests" / "comfy" / "inject_packs" / "popular"
KINDS = ("prompts", "jobs", "kills", "environments", "headers", "soak")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="some of the kinds, with commas between")
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no kind {min(unknown)}; there are {', '.join(KINDS)}")

    def times(number: int) -> int:
        return max(3, round(number * args.scale))

    findings = Findings()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as last:
        folder, comfy = Path(name), None
        if {"prompts", "soak"} & set(wanted):
            comfy = last.enter_context(shared_comfyui(folder / "comfyui", findings))
        for kind in wanted:
            began = time.monotonic()
            match kind:
                case "prompts":
                    fuzz_prompts(comfy, times(PROMPTS), findings)
                case "jobs":
                    with random_flux(2, 1, 2) as flux:
                        compare_strategies(flux, times(JOBS), findings)
                case "kills":
                    weights = scripted_weights(folder / "good.safetensors", "good 0.5")
                    kill_at_random(weights, times(KILLS), findings)
                case "environments":
                    run_in_each(folder, findings)
                case "headers":
                    fuzz_headers(times(HEADERS), findings)
                case "soak":
                    soak(comfy, times(ROUNDS), findings)
            print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
    finish(findings.counts, args.json)
    if not findings.clean:
        sys.exit(1)


@contextlib.contextmanager
def shared_comfyui(folder: Path, findings: Findings) -> Iterator[Comfy]:
    """Yields one ComfyUI whose ranks are forks. A process that outlives it is a finding."""
    (folder / "custom_nodes").mkdir(parents=True)
    (folder / "custom_nodes" / "parallel_test_popular").symlink_to(PACKS)
    server = start_comfyui(folder, environment={"PARALLEL_TEST_FORKED_RANKS": "1"})
    with server:
        yield Comfy(server)
    for left in server.survivors:
        findings.add("survivors", f"2 s after ComfyUI's end: {left}")


if __name__ == "__main__":
    main()
