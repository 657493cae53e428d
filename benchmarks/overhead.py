"""Costs of the sidecar beyond compute: hand-off of a job, what accelerators add to it, and a cold start.

    python benchmarks/overhead.py [--runs 40] [--starts 3] [--json]

handoff_ms: wall time of a warm 4-step job of a tiny Flux, from ComfyUI's sampling function to its result, minus the
time of its steps in the processes; accelerators_job_ms: the same with a LoRA, EasyCache, NAG and another pack's
attention kernel on the MODEL; accelerators_step_ms: time of a step with all of them in one process, minus that in
stock ComfyUI.
start_to_ready_s: from nothing to two processes that take jobs, without loading weights.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median

from subject import ROOT, finish, make_parser

from comfy_harness import Comfy, start_comfyui
from graphs import STOCK, Graph
from lora_files import write_loras
from parallel_backend.sidecar.sidecar import Sidecar

ROUNDS = 5  # in which the ways take turns
PACKS = {"bench_jobs": "benchmarks/job_times", "parallel_test_popular": "tests/comfy/inject_packs/popular"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args()

    starts = []
    for _ in range(args.starts):
        sidecar = Sidecar(("cpu:0", "cpu:1"))
        begin = time.perf_counter()
        sidecar.start()
        starts.append(time.perf_counter() - begin)
        sidecar.stop()
    with tempfile.TemporaryDirectory() as folder:
        times = _job_times(Path(folder), max(1, args.runs // ROUNDS))
    beyond = {
        way: median(one["seconds"] - sum(one["steps"]) for one in found) for way, found in times.items()
    }
    steps = {
        way: median(seconds for one in found for seconds in one["steps"]) for way, found in times.items()
    }
    result = {
        "handoff_ms": round(1e3 * beyond["plain"], 2),
        "accelerators_job_ms": round(1e3 * beyond["accelerated"], 2),
        "accelerators_step_ms": round(
            1e3 * (steps["accelerated, 1 process"] - steps["accelerated, stock"]), 2
        ),
        "start_to_ready_s": round(median(starts), 2),
    }
    print(f"hand-off of a 4-step job, 2 processes: {result['handoff_ms']} ms beyond the steps")
    print(f"with every accelerator: {result['accelerators_job_ms']} ms")
    print(f"a step with every accelerator: {result['accelerators_step_ms']} ms more than in stock ComfyUI")
    print(f"cold start to ready, 2 processes: {result['start_to_ready_s']} s (median of {args.starts})")
    finish(result, args.json)


def _job_times(folder: Path, runs: int) -> dict[str, list[dict]]:
    """Runs the ways in turn in one ComfyUI; returns the times of each run, by way."""
    (folder / "custom_nodes").mkdir()
    for name, pack in PACKS.items():
        (folder / "custom_nodes" / name).symlink_to(ROOT / pack)
    server = start_comfyui(folder)
    found: dict[str, list[dict]] = {}
    with server:
        comfy = Comfy(server)
        unet = comfy.write_flux("bench.safetensors", double_blocks=1, single_blocks=2)
        loras = folder / "models" / "loras"
        loras.mkdir(exist_ok=True)
        lora = write_loras(loras)["kohya"]
        ways = {
            "plain": ("cpu:2", False),
            "accelerated": ("cpu:2", True),
            "accelerated, 1 process": ("cpu:1", True),
            "accelerated, stock": (None, True),
        }
        for _ in range(ROUNDS):
            for way, (devices, accelerated) in ways.items():
                graph = Graph()
                if devices is None:
                    model = graph.model(STOCK, unet)
                else:
                    degrees = {"ulysses": 2} if devices == "cpu:2" else {"cfg": 1}
                    model = [graph.parallel_loader(unet, devices, **degrees), 1]
                if accelerated:
                    model = _accelerated(graph, model, lora)
                texts = {"positive": graph.text(1), "negative": graph.text(2)}
                numbers = {"steps": 4, "cfg": 2.0, "runs": runs}
                latent = graph.latent(width=32, height=32)
                graph.add("BenchJob", model=model, **texts, latent=latent, **numbers, path="times.json")
                comfy.run(graph.prompt, timeout=600)
                found.setdefault(way, []).extend(json.loads(comfy.output("times.json").read_text()))
    return found


def _accelerated(graph: Graph, model: list, lora: str) -> list:
    model = [graph.add("LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=0.8), 0]
    model = [graph.add("TestAttentionKernel", model=model), 0]
    cache = {"reuse_threshold": 0.0, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    model = [graph.add("EasyCache", model=model, **cache), 0]
    guidance = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
    return [graph.add("NAGuidance", model=model, **guidance), 0]


if __name__ == "__main__":
    main()
