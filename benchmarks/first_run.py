"""Measures what a new user waits for: the first picture of "Try it without a download", and the next one.

python benchmarks/first_run.py [--rounds 3] [--sizes] [--json]

Each round starts a real ComfyUI on the CPU in an empty folder, as after an installation: nothing measured, no rank
running, all cores. The time runs from the template's prompt being queued, as Run does, until ComfyUI's history has it
as ended. A second prompt with another seed follows. With --sizes a third one asks for a picture of another size. The
last line is {"first_s", "second_s"} (and "size_s"), medians over the rounds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from subject import ROOT, finish, make_parser

from comfyui_client import ComfyUIClient, Prompt
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from parallel_backend.wire.cache_folder import VARIABLE
from workflow_to_api import workflow_to_api

TEMPLATE = ROOT / "example_workflows" / "Try it without a download.json"
SIZE = 192  # pixels; the template's own is 128


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", action="store_true", help="one more picture, of another size")
    args = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # ComfyUI and its ranks use all cores, as for a user
    times: dict[str, list[float]] = {}
    for number in range(args.rounds):
        with fresh_comfyui() as client:
            prompt = workflow_to_api(json.loads(TEMPLATE.read_text("utf-8")), client.object_info())
            for name, seed, size in pictures(with_size=args.sizes):
                times.setdefault(name, []).append(timed(client, changed(prompt, seed, size)))
        seen = ", ".join(f"{name} {seconds[-1]:.2f}" for name, seconds in times.items())
        print(f"round {number + 1}: {seen}", flush=True)
    finish({name: round(median(seconds), 2) for name, seconds in times.items()}, args.json)


def pictures(*, with_size: bool) -> Iterator[tuple[str, int, int]]:
    yield "first_s", 7, 128
    yield "second_s", 8, 128
    if with_size:
        yield "size_s", 9, SIZE


@contextmanager
def fresh_comfyui() -> Iterator[ComfyUIClient]:
    """Yields a client of a ComfyUI that has started and run nothing yet."""
    comfyui = find_comfyui()
    if comfyui is None:
        raise SystemExit("No ComfyUI found: run ./scripts/test once, or set COMFYUI_PATH.")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "comfyui"
        base.mkdir()
        packs = {"comfyui-parallel-sampling": ROOT}
        environment = {VARIABLE: str(Path(folder) / "kept")}
        with ComfyUIServer(comfyui, base, packs, cpu=True, environment=environment) as server:
            yield ComfyUIClient(server.url)


def changed(prompt: Prompt, seed: int, size: int) -> Prompt:
    """Returns the template's prompt with this seed and size (pixels per side)."""
    asked = json.loads(json.dumps(prompt))
    for node in asked.values():
        inputs = node["inputs"]
        if "seed" in inputs:
            inputs["seed"] = seed
        if "width" in inputs:
            inputs["width"] = inputs["height"] = size
    return asked


def timed(client: ComfyUIClient, prompt: Prompt) -> float:
    begun = time.monotonic()
    client.run(prompt, timeout=300)
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
