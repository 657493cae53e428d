"""Flux.1 at its full size with random weights on one GPU: stock ComfyUI against Parallel Model, in one ComfyUI.

    python benchmarks/one_gpu.py [--prompts 4] [--steps 8] [--file FILE] [--json]
    python benchmarks/one_gpu.py --tiny    the same with a small model, on the CPU too

Writes 23.8 GB if there is no file yet (in a temporary folder unless --file names it; put TMPDIR on a fast disk or in
memory). Each way runs its prompts in a row with different seeds, because one card may not hold the model twice. Reports
seconds of the first prompt, which loads, the median of the others, and the largest difference of the latents.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import subject  # noqa: F401  puts the tests' support on the path
import torch
from safetensors.torch import save_file
from subject import finish, make_parser
from torch import Tensor

from comfy_harness import Comfy, start_comfyui
from graphs import Graph
from tiny_flux import tiny_flux_tensors

WAYS = ("stock", "parallel")
FULL = {"heads": 24, "double": 19, "single": 38, "context": 4096, "pooled": 768, "tokens": 512, "side": 128}
TINY = {"heads": 2, "double": 1, "single": 1, "context": 64, "pooled": 32, "tokens": 7, "side": 8}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="of each way")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--file", type=Path, help="where the model is, or is to be written")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        file = (args.file or Path(folder, "model.safetensors")).absolute()
        if not file.exists():
            write(file, size)
        results = compare(Path(folder, "comfyui"), file, size, args.prompts, args.steps)
    for name, value in results.items():
        print(f"{name:<20s} {value}")
    finish(results, as_json=args.json)


def write(path: Path, size: dict[str, int]) -> None:
    """Writes a random Flux in bf16. Its blocks are the first of their kind with the rows of each tensor shuffled."""
    one = tiny_flux_tensors(
        heads=size["heads"], context_dim=size["context"], pooled_dim=size["pooled"], guidance=True
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors: dict[str, Tensor] = {}
    for name, value in one.items():
        kind, _, rest = name.partition(".0.")
        count = {"double_blocks": size["double"], "single_blocks": size["single"]}.get(kind, 0)
        value = value.to(device, torch.bfloat16)
        if not count:
            tensors[name] = value.cpu()
        for number in range(count):
            rows = torch.randperm(len(value), device=device) if number else slice(None)
            tensors[f"{kind}.{number}.{rest}"] = value[rows].contiguous().cpu()
    save_file(tensors, path)


def compare(folder: Path, file: Path, size: dict[str, int], prompts: int, steps: int) -> dict[str, object]:
    models = folder / "models" / "diffusion_models"
    models.mkdir(parents=True)
    (models / "model.safetensors").symlink_to(file)
    on_gpu = torch.cuda.device_count() > 0  # creates no CUDA context in this process
    server = start_comfyui(folder, cpu=not on_gpu)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    latents: dict[str, list[Tensor]] = {way: [] for way in WAYS}
    with server:
        comfy = Comfy(server)
        for way in WAYS:
            for seed in range(prompts):
                graph, latent = prompt(way, seed, size, steps, "0" if on_gpu else "cpu:1")
                begun = time.perf_counter()
                latents[way].append(comfy.sample(graph.prompt, latent, timeout=600))
                seconds[way].append(time.perf_counter() - begun)
    pairs = list(zip(latents["stock"], latents["parallel"], strict=True))
    worst = max(((ours - stock).abs().max() / stock.abs().max()).item() for stock, ours in pairs)
    found: dict[str, object] = {
        f"{way}_{name}_s": round(value, 3)
        for way in WAYS
        for name, value in (("first", seconds[way][0]), ("median", median(seconds[way][1:])))
    }
    return found | {"worst_difference": worst, "same_bits": all(ours.equal(stock) for stock, ours in pairs)}


def prompt(way: str, seed: int, size: dict[str, int], steps: int, devices: str) -> tuple[Graph, list]:
    """Returns the graph and the output that has its latent."""
    graph = Graph()
    model = [graph.add("UNETLoader", unet_name="model.safetensors", weight_dtype="default"), 0]
    text = graph.text(1, tokens=size["tokens"], width=size["context"], pooled_width=size["pooled"])
    shape = f"1,16,{size['side']},{size['side']}"
    latent = [graph.add("TestShapedLatent", shape=shape, draw=-1), 0]
    if way == "parallel":
        model = [graph.add("ParallelModel", model=model, strategy=graph.strategy(devices)), 0]
    return graph, graph.ksampler(model, text, text, latent, seed=seed, steps=steps)


if __name__ == "__main__":
    main()
