"""`python -m parallel_backend plan`: predictions for hardware one does not own, labelled so, with error bands."""

from __future__ import annotations

import argparse
import json
import re
import sys

from ..errors import RequestError
from ..models.catalog import FAMILIES, WEIGHT_BYTES, find_family, split_name
from ..models.registry import is_loadable
from ..options import ComputeOptions
from .cost.model import Machine
from .job import Job
from .job_models import CatalogModel
from .machine.cards import CARDS, LINKS, find_card, find_link
from .ranking import (
    APPROXIMATION,
    BAND_WITH_ONE_GPU,
    Evidence,
    RankedCandidate,
    Ranking,
    enumerate_candidates,
    rank_candidates,
)

MAX_GPUS = 64
MODES = ("eager", "compiled")
_SOURCES = "closed forms and data sheets; bands from published measurements, see docs/selector.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help=f"one of {', '.join(FAMILIES)}; suffix -fp8 or -q4 allowed"
    )
    parser.add_argument("--gpus", type=int, required=True, help=f"number of equal cards, 1 to {MAX_GPUS}")
    parser.add_argument("--card", required=True, help=f"one of {', '.join(CARDS)}")
    parser.add_argument("--link", required=True, help=f"nvlink, pcie, or one of {', '.join(LINKS)}")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels; the model's usual size if not given")
    parser.add_argument("--frames", type=int, help="of a video")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--batch", type=int, default=1, help="images at once")
    parser.add_argument(
        "--cfg", choices=("on", "off"), help="a negative prompt is evaluated; as usual for the model"
    )
    parser.add_argument(
        "--weights", choices=sorted(WEIGHT_BYTES), help="storage of the weights; bf16 if not given"
    )
    parser.add_argument(
        "--mode", choices=MODES, default="eager", help="compiled: torch.compile or CUDA graphs"
    )
    parser.add_argument("--memory", type=float, help="GB of each card that may be used, if not its own")
    parser.add_argument(
        "--approximation", choices=APPROXIMATION, default="if_needed", help="when PipeFusion may be used"
    )
    parser.add_argument("--step-seconds", type=float, help="measured seconds of one step on one such card")
    parser.add_argument("--rows", type=int, default=8, help="candidates to show")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Raises RequestError for what the tables do not know, naming what they do."""
    job, machine = _job(args), _machine(args)
    ranking = rank_candidates(
        enumerate_candidates(job, machine.count),
        job,
        machine,
        Evidence(one_gpu_s=args.step_seconds),
        approximation=args.approximation,
    )
    shown = ranking.ranked[: max(1, args.rows)]
    one = next(e for e in ranking.ranked if e.strategy.world_size == 1)
    if one not in shown:
        shown = (*shown, one)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(ranking, shown, one, job, machine)) + "\n")
    else:
        sys.stdout.write(_as_table(ranking, shown, one, job, machine, args.mode) + "\n")
    return 0


def _job(args: argparse.Namespace) -> Job:
    family = find_family(args.model)
    width, height, frames = family.default_size
    if args.size:
        size = re.fullmatch(r"(\d{2,5})[x×](\d{2,5})", args.size.strip().lower())
        if not size:
            raise RequestError(
                f"size {args.size!r} is not understood; write WIDTHxHEIGHT, such as 1024x1024."
            )
        width, height = int(size[1]), int(size[2])
    for name, value in (("frames", args.frames), ("steps", args.steps), ("batch", args.batch)):
        if value is not None and value < 1:
            raise RequestError(f"{name} {value}: it must be at least 1.")
    if args.frames and args.frames > 1 and family.temporal == 1:
        raise RequestError(f"frames {args.frames}: {family.name} makes images; leave --frames out.")
    prompts = family.true_cfg if args.cfg is None else 2 if args.cfg == "on" else 1
    storage = args.weights or split_name(args.model)[1]
    return Job(
        CatalogModel(
            family, WEIGHT_BYTES[storage], ComputeOptions("blocks" if args.mode == "compiled" else "off")
        ),
        width=width,
        height=height,
        frames=args.frames or frames,
        batch=args.batch,
        prompts=prompts,
        steps=args.steps or family.default_steps,
    )


def _machine(args: argparse.Namespace) -> Machine:
    if not 1 <= args.gpus <= MAX_GPUS:
        raise RequestError(f"gpus {args.gpus}: plan for 1 to {MAX_GPUS} cards.")
    if args.memory is not None and args.memory <= 0:
        raise RequestError(f"memory {args.memory:g}: it must be a number of GB above 0.")
    if args.step_seconds is not None and args.step_seconds <= 0:
        raise RequestError(f"step-seconds {args.step_seconds:g}: it must be above 0.")
    card = find_card(args.card)
    return Machine(card, find_link(args.link, card), args.gpus, (args.memory or 0) * 1e9)


def _available(entry: RankedCandidate, job: Job) -> bool:
    """True if this version of the pack can run it, beside what other engines can."""
    world = entry.strategy.world_size
    return is_loadable(job.model.family.name) and not entry.strategy.violations(job.model.shape, world)


def _as_table(
    ranking: Ranking,
    shown: tuple[RankedCandidate, ...],
    one: RankedCandidate,
    job: Job,
    machine: Machine,
    mode: str,
) -> str:
    f = job.model.family
    size = f"{job.width}x{job.height}" + (f"x{job.frames} frames" if job.frames > 1 else "")
    linear, attention = (part / 1e12 for part in job.flop_parts)
    lines = [
        f"PREDICTED, not measured: {f.name}, {size}, {job.steps} steps, {job.rows} rows, {mode}, on "
        f"{machine.count} × {machine.card.name} ({machine.link.name})",
        f"{job.flop / 1e12:.1f} TFLOP a step ({linear:.1f} in linear layers, {attention:.1f} in attention); "
        f"weights {job.model.weight_bytes / 1e9:.1f} GB",
        "",
        f"  {'strategy':34s} {'step s':>8s} {'band':>15s} {'total s':>8s} {'speed-up':>8s} {'GB/GPU':>7s}  remark",
    ]
    for entry in shown:
        p = entry.prediction
        low, high = _band(p.step_s, ranking.band)
        mark = "→" if entry is ranking.best else " "
        remark = entry.reason.split("; ")[0] if entry.fits else entry.reason
        remark += "" if entry.permitted or not entry.fits else ", not asked for"
        remark += "" if _available(entry, job) else "; not in this version of the pack"
        lines.append(
            f"{mark} {entry.strategy.describe():34s} {p.step_s:8.3g} {low:7.3g}–{high:<7.3g} {p.total_s:8.3g} "
            f"{one.prediction.total_s / p.total_s:7.2f}x {entry.memory_bytes / 1e9:7.1f}  {remark}"
        )
    lines += ["", ranking.reason, f"Band: ± {ranking.band:.0%}, 9 of 10 errors are smaller. From {_SOURCES}."]
    if ranking.band > BAND_WITH_ONE_GPU:
        lines.append(
            f"Speed-ups are surer than times (± {BAND_WITH_ONE_GPU:.0%}); measure a step on one such card and pass it "
            "as --step-seconds."
        )
    return "\n".join(lines)


def _band(seconds: float, band: float) -> tuple[float, float]:
    return seconds * (1 - band), seconds * (1 + band)


def _as_json(
    ranking: Ranking, shown: tuple[RankedCandidate, ...], one: RankedCandidate, job: Job, machine: Machine
) -> dict[str, object]:
    return {
        "label": "predicted",
        "source": _SOURCES,
        "model": job.model.family.name,
        "card": machine.card.name,
        "link": machine.link.name,
        "gpus": machine.count,
        "tflop_per_step": round(job.flop / 1e12, 2),
        "band": ranking.band,
        "chosen": ranking.best.strategy.describe(),
        "reason": ranking.reason,
        "candidates": [
            {
                "strategy": e.strategy.as_dict(),
                "shard_weights": e.strategy.shard_weights,
                "name": e.strategy.describe(),
                "predicted_step_s": round(e.prediction.step_s, 5),
                "predicted_step_s_band": [round(x, 5) for x in _band(e.prediction.step_s, ranking.band)],
                "predicted_total_s": round(e.prediction.total_s, 3),
                "predicted_speedup": round(one.prediction.total_s / e.prediction.total_s, 3),
                "memory_gb_per_gpu": round(e.memory_bytes / 1e9, 2),
                "exact": e.strategy.exact,
                "fits": e.fits,
                "permitted": e.permitted,
                "available": _available(e, job),
                "limits": e.prediction.limits,
            }
            for e in shown
        ],
    }
