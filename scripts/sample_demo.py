"""Samples the demo workflow on several ranks and on one in a headless ComfyUI, and compares the results.

Runs in the .venv that scripts/run_demo.py has set up.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from comfyui_client import ComfyUIClient, Prompt, PromptError
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from environment import ROOT
from run_demo import parse_options
from steps import SetupError, exit_on_setup_error, step
from workflow_to_api import WorkflowError, workflow_to_api

sys.path.insert(0, str(ROOT))
from parallel_backend.devices import resolve_devices
from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.rules import StrategySettings, resolve_strategy
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import DEGREES

WORKFLOW = ROOT / "example_workflows" / "Try it without a download.json"
DEMO_MODEL = ROOT / "demo_model" / "transformer.safetensors"
PACK_FOLDER = "comfyui-parallel-sampling"

# Largest difference between the latents of several ranks and of one, relative to the largest value, in fp32: the
# equivalence that this pack promises. GPUs sample in half precision, in which the order of sums matters; there the
# difference is only shown.
TOLERANCE = 1e-4
_PROMPT_TIMEOUT = 600  # seconds


@dataclass(frozen=True)
class Sampled:
    """The results of one run of the workflow: latent ``[B, 16, H/8, W/8]``, PNG bytes, report, times in seconds."""

    latent: torch.Tensor
    png: bytes
    report: str
    first_seconds: float
    warm_seconds: float


def main() -> int:
    """Returns 0, or 1 when the pictures differ by more than rounding."""
    # A closed terminal or a plain kill must stop ComfyUI too: both become an exception that runs the clean-up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    options = parse_options()
    many, one, on_gpus = choose_devices(options.ranks)
    output = options.output.expanduser().resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="parallel-demo-") as folder:
        base = Path(folder)
        offer_in_ui(base)
        # Two ranks on one core each are compared with one rank on one core.
        threads = {} if on_gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        server = ComfyUIServer(
            find_comfyui(), base, {PACK_FOLDER: ROOT}, cpu=not on_gpus, environment=threads
        )
        try:
            with step("Starting ComfyUI with this pack"):
                server.start()
            client = ComfyUIClient(server.url)
            prompt = read_workflow(client)
            try:
                with step(f"Sampling on {options.ranks} processes ({many})"):
                    parallel = sample(client, server, prompt, many)
                with step(f"Sampling on 1 process ({one})"):
                    single = sample(client, server, prompt, one)
            except (PromptError, OSError) as error:  # OSError: it ended, or did not answer in time
                raise SetupError(
                    f"ComfyUI could not run the workflow: {error}\nIts log: {output / 'comfyui.log'}"
                ) from error
            pictures = (output / f"demo_{options.ranks}_ranks.png", output / "demo_1_rank.png")
            for path, sampled in zip(pictures, (parallel, single), strict=True):
                path.write_bytes(sampled.png)
            same = report(options.ranks, parallel, single, pictures, exact=not on_gpus)
            explain(server, keep_open=options.keep_open)
            if options.keep_open:
                wait_for_interrupt()
        finally:
            server.stop()
            if server.log.exists():
                shutil.copyfile(server.log, output / "comfyui.log")
    return 0 if same else 1


def choose_devices(ranks: int) -> tuple[str, str, bool]:
    """Returns (``devices`` for ``ranks`` ranks, ``devices`` for one, True if they are GPUs)."""
    gpus = torch.cuda.device_count()
    if gpus >= ranks:
        chosen = "all" if gpus == ranks else ",".join(str(index) for index in range(ranks))
        return chosen, "0", True
    if gpus:
        print(
            f"   {gpus} GPU found, {ranks} processes wanted: the demo runs on the CPU (try --ranks {max(2, gpus)})."
        )
    return f"cpu:{ranks}", "cpu:1", False


def offer_in_ui(base: Path) -> None:
    """Puts the workflow where ComfyUI's sidebar lists saved workflows, for --keep-open."""
    if not WORKFLOW.is_file():
        raise SetupError(f"{WORKFLOW} is missing; this checkout is not complete.")
    workflows = base / "user" / "default" / "workflows"
    workflows.mkdir(parents=True)
    shutil.copyfile(WORKFLOW, workflows / WORKFLOW.name)


def read_workflow(client: ComfyUIClient) -> Prompt:
    """Returns the demo workflow as a prompt, with nodes that output the sampler's latent and report."""
    try:
        prompt = workflow_to_api(json.loads(WORKFLOW.read_text()), client.object_info())
    except WorkflowError as error:
        raise SetupError(f"{WORKFLOW.name} does not fit this ComfyUI or this pack: {error}") from error
    sampler = _only(prompt, "ParallelSampler")
    prompt["demo-latent"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": [sampler, 0], "filename_prefix": "demo"},
    }
    prompt["demo-report"] = {"class_type": "PreviewAny", "inputs": {"source": [sampler, 1]}}
    return prompt


def sample(client: ComfyUIClient, server: ComfyUIServer, prompt: Prompt, devices: str) -> Sampled:
    """Runs ``prompt`` on ``devices``, then once more with another seed for the time of warm ranks."""
    prompt = copy.deepcopy(prompt)
    sampler, selector = _only(prompt, "ParallelSampler"), _only(prompt, "StrategySelector")
    # Chosen by hand: `auto` may find one device faster for such a small picture, with nothing left to compare.
    prompt[selector]["inputs"] |= {"mode": "manual", "devices": devices, **degrees(devices)}

    def tell(words: str) -> None:
        print(f"   {words}; the last line of its log is\n{server.log_tail(1)}", flush=True)

    started = time.monotonic()
    outputs = client.run(prompt, _PROMPT_TIMEOUT, tell)["outputs"]
    first_seconds = time.monotonic() - started
    latent = load_file(_saved_file(server, outputs["demo-latent"]["latents"][0]))["latent_tensor"]
    (image,) = outputs[_only(prompt, "SaveImage")]["images"]

    again = copy.deepcopy(prompt)
    again[sampler]["inputs"]["seed"] += 1
    started = time.monotonic()
    warm = client.run(again, _PROMPT_TIMEOUT, tell)["outputs"]
    warm_seconds = time.monotonic() - started
    return Sampled(
        latent=latent,
        png=client.view(image),
        report=warm["demo-report"]["text"][0],
        first_seconds=first_seconds,
        warm_seconds=warm_seconds,
    )


def degrees(devices: str) -> dict[str, int]:
    """Returns the degrees that the rule "CFG, then Ulysses, then Ring" gives for all of ``devices``."""
    job = Job(CheckpointModel(inspect_model(str(DEMO_MODEL))), prompts=2)
    strategy = resolve_strategy(StrategySettings(), job, resolve_devices(devices)).strategy
    return {name: getattr(strategy, name) for name in DEGREES}


def report(
    ranks: int, parallel: Sampled, single: Sampled, pictures: tuple[Path, Path], *, exact: bool
) -> bool:
    """Prints the results. Returns True if the two latents agree as far as they must (always unless ``exact``)."""
    scale = single.latent.abs().max().item()
    difference = (parallel.latent - single.latent).abs().max().item()
    for name, sampled in ((f"{ranks} processes", parallel), ("1 process", single)):
        print(
            f"\n{name}: {sampled.first_seconds:.1f} s with start and loading, {sampled.warm_seconds:.1f} s warm"
        )
        print("\n".join(f"   {line}" for line in sampled.report.splitlines()))
    print(
        f"\nLargest latent difference: {difference:.2e} (largest value {scale:.2f}, {difference / scale:.1e} of it)"
    )
    same = bool(torch.isfinite(parallel.latent).all()) and difference <= TOLERANCE * scale
    if not same and exact:
        print(f"That is more than rounding ({TOLERANCE:.0e} of the largest value): please report it.")
    print("Pictures:")
    for path in pictures:
        print(f"   {path}")
    return same or not exact


def explain(server: ComfyUIServer, *, keep_open: bool) -> None:
    """Prints how to open the UI and how to install the pack permanently."""
    if keep_open:
        print(
            f'\nComfyUI is running: open {server.url} and choose "{WORKFLOW.stem}" under Workflows. Ctrl+C ends it.'
        )
    else:
        print("\nTo see it in the browser: ./scripts/demo --keep-open")
    print(
        "To use it in your own ComfyUI, in its Python environment:\n"
        f'   ln -s "{ROOT}" /path/to/ComfyUI/custom_nodes/{PACK_FOLDER}\n'
        f'   pip install -r "{ROOT / "requirements.txt"}"\n'
        "and restart ComfyUI; the workflows are under Templates.",
        flush=True,
    )


def wait_for_interrupt() -> None:
    """Waits for Ctrl+C."""
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("\nStopping ComfyUI.")


def _only(prompt: Prompt, class_type: str) -> str:
    found = [node_id for node_id, node in prompt.items() if node["class_type"] == class_type]
    if len(found) != 1:
        raise SetupError(f"{WORKFLOW.name} has {len(found)} {class_type} nodes; the demo needs one.")
    return found[0]


def _saved_file(server: ComfyUIServer, saved: dict[str, str]) -> Path:
    return server.output_directory / saved["subfolder"] / saved["filename"]


if __name__ == "__main__":
    exit_on_setup_error(main)
