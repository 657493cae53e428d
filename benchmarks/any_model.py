"""ComfyUI's own modules on two ranks: efficiency of split tokens and of bands, time of a start, host memory.

    python benchmarks/any_model.py [--rounds 7] [--only efficiency,bands,start,host] [--json]

- efficiency: t(1) / (2 * t(2)) of a model call of a random Wan (hidden 512) over 2,048 tokens, medians of interleaved
  calls, in both modes that split tokens;
- bands: the same ratio for a random UNet of SDXL's shape, 64 wide, on the latent of an image of 1024 x 1024 pixels;
- start: a cold start of two ranks and the load of a small file, including the import of comfy;
- host: the host memory that 2 and 4 ranks take for a file, by its format.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from subject import finish, make_parser, ranks_on

from comfy_modules import import_comfyui_here
from comfy_weight_files import inputs, write
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny.cases import TinyModel, build_tiny, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.requests import BANDS, BLOCK, ROWS, STAY, ModelSpec, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from shipped_jobs import ship_call

KINDS = ("efficiency", "bands", "start", "host")
GOALS = {STAY: 0.92, BLOCK: 0.85}
BANDS_GOAL = 0.80
SDXL = {
    "model_channels": 64,
    "num_head_channels": 64,
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
}
START_GOAL, HOST_GOAL = 4.0, 1.15  # s, times the file
# Number of blocks of each kind, by format. If the format is quantised, every rank casts the layers around the blocks to
# float32: with 21 blocks they have one parameter in 187, as in Flux.1.
FORMATS = {"bf16": 6, "float8_e4m3fn": 21, "int8": 21}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(KINDS), help="some of the kinds, with commas between")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no kind {min(unknown)}; there are {', '.join(KINDS)}")
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "efficiency" in wanted:
            result["efficiency"] = _efficiency(folder, args.rounds)
        if "bands" in wanted:
            result["bands"] = _bands(args.rounds)
        if "start" in wanted:
            result["start_s"] = _start(folder)
        if "host" in wanted:
            result["host_growth"] = {form: _host(folder, form) for form in FORMATS}
    finish(result, args.json)


def _wan(folder: Path, **sizes: int) -> ModelSpec:
    source = import_comfyui_here()
    path = folder / f"wan_{sizes['dim']}.safetensors"
    if not path.exists():
        module = fill(build_tiny("wan", text_dim=4096, freq_dim=256, **sizes))
        save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
    return ModelSpec(str(path), family="comfyui", comfyui=source)


def _efficiency(folder: Path, rounds: int) -> dict[str, float]:
    spec = _wan(folder, dim=512, ffn_dim=2048, num_heads=4, num_layers=6)
    x, t = torch.randn(1, 16, 8, 32, 32), torch.tensor([900.0])  # 2 x 2 latent pixels of a frame are a token
    kwargs = {"context": torch.randn(1, 64, 4096), "transformer_options": {}}
    alone, both = Placement(), Placement(ParallelStrategy(ulysses_degree=2))
    seconds: dict[str, list[float]] = {"one": [], STAY: [], BLOCK: []}
    with ranks_on("cpu:0") as one, ranks_on("cpu:0", "cpu:1") as two:
        for number in range(rounds + 1):
            for name, sidecar, placement in (("one", one, alone), (STAY, two, both), (BLOCK, two, both)):
                call = ship_call(spec, (x, t), kwargs, ROWS if name == "one" else name)
                (found,) = sidecar.sample(spec, call, placement).info.step_seconds
                if number:  # the first round loads
                    seconds[name].append(found)
    found = {tokens: round(median(seconds["one"]) / (2 * median(seconds[tokens])), 3) for tokens in GOALS}
    for tokens, efficiency in found.items():
        print(
            f"efficiency, {tokens:5s}  1 rank {1e3 * median(seconds['one']):7.1f} ms  2 ranks "
            f"{1e3 * median(seconds[tokens]):7.1f} ms  {efficiency:.3f} (goal {GOALS[tokens]})",
            flush=True,
        )
    return found


def _bands(rounds: int) -> float:
    """Returns the efficiency of bands. In each round, rank 0 computes the call alone first, then both ranks do."""
    import_comfyui_here()
    model = TinyModel(fill(build_tiny("sdxl", **SDXL)))
    args, kwargs = tiny_inputs("sdxl")(1, 128, 128)

    @torch.inference_mode()
    def take_turns(world: World) -> list[list[float]]:
        forward = make_module_forward(model, Layouts(world), Placement(ParallelStrategy(ulysses_degree=2)))
        alone, both = [], []
        for number in range(rounds + 1):
            for times, tokens in ((alone, ROWS), (both, BANDS)):
                torch.distributed.all_reduce(torch.zeros(1), group=world.control)
                begun = time.perf_counter()
                if tokens == BANDS:
                    forward(ModuleCall(args, kwargs | {"transformer_options": {}}, 1, tokens))
                elif world.rank == 0:
                    model.module(*args, **kwargs, transformer_options={})
                if number:  # the first round warms up
                    times.append(time.perf_counter() - begun)
        return [alone, both]

    alone, both = map(median, run_ranks(take_turns, 2, timeout=60 * (rounds + 1))[0])
    efficiency = round(alone / (2 * both), 3)
    print(
        f"efficiency, bands  1 rank {1e3 * alone:7.1f} ms  2 ranks {1e3 * both:7.1f} ms  {efficiency:.3f} "
        f"(goal {BANDS_GOAL})",
        flush=True,
    )
    return efficiency


def _start(folder: Path) -> float:
    spec = _wan(folder, dim=128, ffn_dim=256, num_heads=1, num_layers=1)
    begun = time.perf_counter()
    with ranks_on("cpu:0", "cpu:1") as sidecar:
        started = sidecar.start()
        loaded = sidecar.load(spec).seconds
        took = time.perf_counter() - begun
    print(
        f"start {started:.1f} s, import of comfy and load {loaded:.1f} s: {took:.1f} s (goal {START_GOAL:g})",
        flush=True,
    )
    return round(took, 2)


def _host(folder: Path, form: str) -> dict[str, float]:
    """Returns the memory growth of 2 and of 4 ranks in file sizes. GIVE_BACK makes them return freed memory at once."""
    source, found = import_comfyui_here(), {}
    path = write(folder / f"{form}.safetensors", form, blocks=FORMATS[form], hidden=1024)
    small = write(folder / f"{form}_small.safetensors", form)
    size, (args, kwargs) = path.stat().st_size, inputs()
    os.environ |= GIVE_BACK
    for ranks in (2, 4):
        placement = Placement(ParallelStrategy(ring_degree=ranks))
        grown = []
        with ranks_on(*(f"cpu:{i}" for i in range(ranks))) as sidecar:
            for file in (small, path):
                spec = ModelSpec(str(file), family="comfyui", comfyui=source)
                sidecar.sample(spec, ship_call(spec, args, kwargs), placement)
                grown.append(sum(map(_proportional, sidecar.pids)))
        found[str(ranks)] = round((grown[1] - grown[0]) / size, 3)
        print(
            f"host, {form}, {ranks} ranks: {found[str(ranks)]:.3f} x the file (goal {HOST_GOAL})", flush=True
        )
    return found


def _proportional(pid: int) -> int:
    """Returns the proportional set size in bytes: a page that n processes map counts 1/n for each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


if __name__ == "__main__":
    main()
