"""Costs of changing a LoRA, beside loading the model: strength, another LoRA, taking it out.

    python benchmarks/lora.py [--runs 7] [--heads 8] [--rank 16] [--ranks 1] [--json]

Each time runs from the request to the answer of one small model call, which reads every weight, less what that call
takes when nothing changed. reload: another file of the same size on the warm ranks, as with a LoRA merged into a
checkpoint; restart: new ranks that load the file. The kinds take turns; medians. The files are in the page cache, so
reload is at its fastest: from a disk it takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from pathlib import Path
from statistics import median

import torch
from subject import finish, prompt, random_flux

from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.requests import ModelSpec, Placement, PredictRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.weight_patches import NO_PATCHES, Factor, WeightPatch, WeightPatches, digest


def lora_on_all_layers(spec: ModelSpec, rank: int, strength: float, seed: int) -> WeightPatches:
    """A LoRA on every linear layer of the blocks, as trainers make them."""
    generator = torch.Generator().manual_seed(seed)
    tensors, patches = {}, []
    for key, shape in inspect_flux(spec.path).original_shapes.items():
        if not key.endswith(".weight") or "blocks" not in key:
            continue
        up = 0.01 * torch.randn(shape[0], rank, generator=generator)
        down = torch.randn(rank, shape[1], generator=generator)
        named = {"up": digest(up), "down": digest(down)}
        tensors |= {named["up"]: up, named["down"]: down}
        factors = tuple(Factor(role, found) for role, found in named.items())
        patches.append(WeightPatch(key, "lora", factors, strength, alpha=float(rank)))
    return WeightPatches(tuple(patches), tensors)


def at_strength(patches: WeightPatches, strength: float) -> WeightPatches:
    changed = tuple(WeightPatch(p.key, p.kind, p.factors, strength, alpha=p.alpha) for p in patches.patches)
    return WeightPatches(changed, patches.tensors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for as many GPUs as --ranks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    placement = Placement(ParallelStrategy(ulysses_degree=args.ranks))
    devices = tuple(f"{args.device}:{i}" for i in range(args.ranks))
    x = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    call = PredictRequest(x, torch.tensor([0.7]), prompt(1))
    with random_flux(heads=args.heads) as spec:
        other_file = ModelSpec(shutil.copy(spec.path, Path(spec.path).with_name("other.safetensors")))
        size = inspect_flux(spec.path).tensor_bytes
        one, two = (lora_on_all_layers(spec, args.rank, 1.0, seed) for seed in (1, 2))
        sidecar, cold = Sidecar(devices), Sidecar(devices)

        def timed(file: ModelSpec, patches: WeightPatches, ranks: Sidecar = sidecar) -> float:
            begin = time.perf_counter()
            ranks.predict(file, call, placement, patches=patches)
            return time.perf_counter() - begin

        times: dict[str, list[float]] = {
            name: [] for name in ("call", "first", "strength", "other_lora", "remove", "reload", "restart")
        }
        strengths = itertools.cycle((0.5, 0.8, -0.3))
        try:
            timed(spec, NO_PATCHES)
            for run in range(args.runs + 1):  # the first is not counted
                took = {
                    "first": timed(spec, one),
                    "strength": timed(spec, at_strength(one, next(strengths))),
                }
                timed(spec, two)  # its factors are sent
                took["call"] = timed(spec, two)
                took["other_lora"] = timed(spec, one)
                took["remove"] = timed(spec, NO_PATCHES)
                took["reload"] = timed(other_file, NO_PATCHES)
                took["restart"] = timed(spec, NO_PATCHES, cold)
                cold.stop()
                timed(spec, NO_PATCHES)
                for name, seconds in took.items() if run else ():
                    times[name].append(seconds)
        finally:
            sidecar.stop()
            cold.stop()
        factor_bytes = sum(t.nbytes for t in one.tensors.values())

    warm = median(times.pop("call"))
    result: dict[str, object] = {f"{name}_s": round(median(t) - warm, 4) for name, t in times.items()}
    for name in ("strength", "other_lora", "remove"):
        for whole in ("reload", "restart"):
            result[f"{name}_of_{whole}"] = round(result[f"{name}_s"] / max(result[f"{whole}_s"], 1e-9), 4)
    result |= {
        "call_s": round(warm, 4),
        "model_mib": round(size / 2**20, 1),
        "changed_weights": len(one.keys),
        "factors_mib": round(factor_bytes / 2**20, 1),
        "devices": list(devices),
        "runs": args.runs,
    }
    print(
        f"{size / 2**20:.0f} MiB of weights, a LoRA of rank {args.rank} on {len(one.keys)} tensors, "
        f"{len(devices)} rank(s)"
    )
    for name in times:
        spread = max(times[name]) - min(times[name])
        print(
            f"{name.replace('_', ' '):>12}: {result[f'{name}_s']:.3f} s beyond the call (spread {spread:.3f} s)"
        )
    for whole in ("reload", "restart"):
        print(f"a change of strength takes {result[f'strength_of_{whole}']:.1%} of a {whole}")
    finish(result, args.json)


if __name__ == "__main__":
    main()
