"""`python -m parallel_backend plan`: memory, FLOPs, bytes and a bound of each strategy on hardware one does not own."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass

from ..devices import machine_of
from ..errors import RequestError
from ..layout import crosses_machines
from ..machine.cards import CARDS, LINKS, Card, Interconnect, find_card, find_link
from ..models.catalog import FAMILIES, WEIGHT_BYTES, find_family, split_name
from ..models.registry import is_loadable
from ..options import ComputeOptions
from ..planner.candidates import APPROXIMATION, Candidate, Ranking, enumerate_candidates, rank_candidates
from ..planner.job import Job
from ..planner.job_models import CatalogModel
from ..planner.memory.rank_memory import fullest_rank
from ..planner.sheet import bytes_sent, compute_share, lower_bound
from ..strategy import ParallelStrategy

MAX_GPUS = 64
MODES = ("eager", "compiled")
USABLE_MEMORY = 0.94  # of a card; the rest is fragmentation and the desktop
_BOUND = (
    "A bound is no prediction: peak rates of the card and the link, everything at the same time. A real step takes "
    "longer, by a factor that only measuring tells."
)


@dataclass(frozen=True)
class Cards:
    """`count` equal cards on one link. `usable`: bytes of each that may be used; `machines`: that they are in, as many
    in each; `network`: bytes/s that leave a machine for the others, nominal."""

    card: Card
    link: Interconnect
    count: int
    usable: float
    machines: int = 1
    network: float = 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        """Names, as a cluster's devices have them."""
        inside = self.count // self.machines
        return tuple(f"cuda:{i % inside}@plan/{i // inside}" for i in range(self.count))

    def bound(self, job: Job, strategy: ParallelStrategy) -> float:
        """Seconds that no step can go below, the network's included."""
        alone = lower_bound(job, strategy, self.card, self.link)
        across = self.bytes_across(job, strategy)
        return max(alone, across / self.network) if across else alone

    def bytes_across(self, job: Job, strategy: ParallelStrategy) -> float:
        """At least so many leave a machine in a step: latents for rows elsewhere, a stage's tokens for the next one, or
        its shares of the weights, whichever is most."""
        homes = [machine_of(device) for device in self.devices[: strategy.world_size]]
        if len(set(homes)) == 1:
            return 0.0
        rows = strategy.replace(
            pipefusion_degree=1, ulysses_degree=1, ring_degree=1, tensor_degree=1, shard_weights=False
        )
        image = len(homes) // strategy.row_degree  # ranks that compute the same rows
        elsewhere = max(sum(home != own for home in homes[i % image :: image]) for i, own in enumerate(homes))
        found = bytes_sent(job, rows) * elsewhere / max(1, strategy.row_degree - 1)
        if any(len(set(homes[first : first + image])) > 1 for first in range(0, len(homes), image)):
            piped = rows.replace(pipefusion_degree=strategy.pipefusion_degree)
            found = max(found, bytes_sent(job, piped) - bytes_sent(job, rows))
        shares = bytes_sent(job, strategy) - bytes_sent(job, strategy.replace(shard_weights=False))
        return max(found, shares / (len(homes) - 1) * homes.count(homes[0]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help=f"one of {', '.join(FAMILIES)}; suffix -fp8 or -q4 allowed"
    )
    parser.add_argument("--gpus", type=int, required=True, help=f"number of equal cards, 1 to {MAX_GPUS}")
    parser.add_argument("--card", required=True, help=f"one of {', '.join(CARDS)}")
    parser.add_argument("--link", required=True, help=f"nvlink, pcie, or one of {', '.join(LINKS)}")
    parser.add_argument("--machines", type=int, default=1, help="that the cards are in, as many in each")
    parser.add_argument(
        "--network", type=float, help="of several machines: Gbit/s of each, such as 10 or 100"
    )
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
    parser.add_argument("--rows", type=int, default=8, help="candidates to show")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the sheet of each candidate. Raises RequestError for what the tables do not know, naming what they do."""
    job, cards = _job(args), _cards(args)
    ranking = rank_candidates(
        (
            _candidate(strategy, job, cards)
            for strategy in enumerate_candidates(job, cards.count)
            if not crosses_machines(strategy, cards.devices)
        ),
        approximation=args.approximation,
    )
    shown = ranking.ranked[: max(1, args.rows)]
    one = next(e for e in ranking.ranked if e.strategy.world_size == 1)
    if one not in shown:
        shown = (*shown, one)
    write = _as_json if args.json else _as_table
    sys.stdout.write(write(ranking, shown, job, cards, args.mode) + "\n")
    return 0


def _candidate(strategy: ParallelStrategy, job: Job, cards: Cards) -> Candidate:
    memory = fullest_rank(job.model.memory(job, strategy)).private_bytes
    return Candidate(strategy, memory, memory <= cards.usable)


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


def _cards(args: argparse.Namespace) -> Cards:
    if not 1 <= args.gpus <= MAX_GPUS:
        raise RequestError(f"gpus {args.gpus}: plan for 1 to {MAX_GPUS} cards.")
    if args.memory is not None and args.memory <= 0:
        raise RequestError(f"memory {args.memory:g}: it must be a number of GB above 0.")
    if args.machines < 1 or args.gpus % args.machines:
        raise RequestError(f"machines {args.machines}: {args.gpus} cards do not divide over so many.")
    if args.machines > 1 and not (args.network or 0) > 0:
        raise RequestError("network: give the Gbit/s of each machine, such as --network 100.")
    if args.machines == 1 and args.network is not None:
        raise RequestError(f"network {args.network:g}: one machine needs none; give --machines 2 or more.")
    card = find_card(args.card)
    usable = (args.memory or card.memory * USABLE_MEMORY) * 1e9
    network = (args.network or 0.0) * 1e9 / 8
    return Cards(card, find_link(args.link, card), args.gpus, usable, args.machines, network)


def _available(strategy: ParallelStrategy, job: Job) -> bool:
    """True if this version of the pack can run it, beside what other engines can."""
    return is_loadable(job.model.family.name) and not strategy.violations(
        job.model.shape, strategy.world_size
    )


def _as_table(ranking: Ranking, shown: tuple[Candidate, ...], job: Job, cards: Cards, mode: str) -> str:
    f = job.model.family
    size = f"{job.width}x{job.height}" + (f"x{job.frames} frames" if job.frames > 1 else "")
    linear, attention = (part / 1e12 for part in job.flop_parts)
    where = cards.link.name
    if cards.machines > 1:
        where += f", in {cards.machines} machines, {cards.network / 1e9:g} GB/s between them"
    lines = [
        f"COMPUTED from sizes and data sheets, not measured: {f.name}, {size}, {job.steps} steps, {job.rows} rows, "
        f"{mode}, on {cards.count} × {cards.card.name} ({where})",
        f"{job.flop / 1e12:.1f} TFLOP a step ({linear:.1f} in linear layers, {attention:.1f} in attention); "
        f"weights {job.model.weight_bytes / 1e9:.1f} GB",
        "",
        f"  {'strategy':34s} {'GB/GPU':>7s} {'TFLOP/GPU':>9s} {'GB sent':>8s} {'bound s':>8s}  remark",
    ]
    for entry in shown:
        strategy = entry.strategy
        mark = "→" if entry is ranking.best else " "
        remark = "exact" if strategy.exact else "approximate"
        remark = remark if entry.fits else f"does not fit: {cards.usable / 1e9:.1f} GB a GPU can be used"
        remark += "" if entry.permitted or not entry.fits else ", not asked for"
        remark += "" if _available(strategy, job) else "; not in this version of the pack"
        lines.append(
            f"{mark} {strategy.describe():34s} {entry.memory_bytes / 1e9:7.1f} "
            f"{job.flop * compute_share(job, strategy) / 1e12:9.2f} {bytes_sent(job, strategy) / 1e9:8.3f} "
            f"{cards.bound(job, strategy):8.3g}  {remark}"
        )
    why = ranking.reason or "the rule: all devices, CFG, then Ulysses, then Ring; the first that fits"
    if cards.machines > 1:
        why += "; strategies that exchange tokens or layers between machines are left out, as `auto` does"
    return "\n".join(
        [*lines, "", f"→ {why}. A first job tries others on its way and keeps the fastest.", _BOUND]
    )


def _as_json(ranking: Ranking, shown: tuple[Candidate, ...], job: Job, cards: Cards, mode: str) -> str:
    found = {
        "label": "computed",
        "bound": _BOUND,
        "model": job.model.family.name,
        "card": cards.card.name,
        "link": cards.link.name,
        "gpus": cards.count,
        "machines": cards.machines,
        "mode": mode,
        "tflop_per_step": round(job.flop / 1e12, 2),
        "chosen": ranking.best.strategy.describe(),
        "reason": ranking.reason,
        "candidates": [
            {
                "strategy": e.strategy.as_dict(),
                "shard_weights": e.strategy.shard_weights,
                "name": e.strategy.describe(),
                "memory_gb_per_gpu": round(e.memory_bytes / 1e9, 2),
                "tflop_per_gpu": round(job.flop * compute_share(job, e.strategy) / 1e12, 3),
                "gb_sent_per_gpu": round(bytes_sent(job, e.strategy) / 1e9, 4),
                "gb_between_machines": round(cards.bytes_across(job, e.strategy) / 1e9, 4),
                "step_s_at_least": round(cards.bound(job, e.strategy), 5),
                "exact": e.strategy.exact,
                "fits": e.fits,
                "permitted": e.permitted,
                "available": _available(e.strategy, job),
            }
            for e in shown
        ],
    }
    return json.dumps(found)
