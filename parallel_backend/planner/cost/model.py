"""Predicts the time of a strategy: pure functions of job, strategy, hardware and a few constants.

One step on a rank takes the longer of what its GPU does and what its CPU launches:

    GPU = weights read once + compute * share + exposed communication + calls * latency
    CPU = one GPU's launches + calls * launch of a collective        (in compiled mode: next to nothing)

and a request takes steps * step + the fixed part (text encoder, decoder). The constants are fitted to published
measurements by benchmarks/selector.py; docs/selector.md has the table. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

from ...strategy import ParallelStrategy
from ...wire.calibration import ALL_TO_ALL, POINT_TO_POINT, Calibration, slowest_rate
from ..job import Job
from ..machine.cards import Card, Interconnect
from .communication import exchanges, unit_load

# Share of a card's memory that may be planned with; the rest is fragmentation and the desktop.
USABLE_MEMORY = 0.94


@dataclass(frozen=True)
class Constants:
    """The facts that no data sheet has, the same for every card, link and model; defaults: the priors of the fit.

    call_s: GPU time that a collective takes before its first byte; hop_s: the same for a ring hop, with the smaller
    attention call and the merge that it needs; host_block_s, host_call_s: CPU time to launch a block, a collective in
    eager mode; reached_*: share of a link's nominal rate (nvlink, pcie, through the host, to another socket or node);
    ring_overlap: share of a ring's transfer that hides behind attention; pipeline: share of the time that a stage of
    PipeFusion is busy; decoder: share of the peak rate that text encoder and decoder reach; eager, compiled: the
    denoiser in these modes.
    """

    call_s: float = 45e-6
    hop_s: float = 120e-6
    host_block_s: float = 1.0e-3
    host_call_s: float = 120e-6
    reached_nvlink: float = 0.7
    reached_pcie: float = 0.75
    reached_host: float = 0.4
    reached_outside: float = 0.5
    ring_overlap: float = 0.3
    pipeline: float = 0.8
    decoder: float = 0.15
    eager: float = 0.45
    compiled: float = 0.6

    def replace(self, **changes: float) -> Constants:
        return Constants(**{f.name: changes.get(f.name, getattr(self, f.name)) for f in fields(self)})


# Fitted to all of benchmarks/data by `python benchmarks/selector.py --constants`.
DEFAULT = Constants(
    call_s=41e-6,
    hop_s=120e-6,
    host_block_s=1.1e-3,
    host_call_s=133e-6,
    reached_nvlink=0.70,
    reached_pcie=0.83,
    reached_host=0.40,
    reached_outside=0.50,
    ring_overlap=0.30,
    pipeline=0.88,
    decoder=0.183,
    eager=0.563,
    compiled=0.619,
)


@dataclass(frozen=True)
class Machine:
    """`count` equal cards on one link. `memory`: bytes per card that may be used, the card's own unless given;
    `on_cpu`: the cards are shares of a CPU."""

    card: Card
    link: Interconnect
    count: int
    memory: float = 0.0
    on_cpu: bool = False

    @property
    def usable(self) -> float:
        return self.memory or self.card.memory * 1e9 * USABLE_MEMORY


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a strategy. Seconds per step and per request, bytes per rank; `limits`: in words.

    `communication_s`: latency and `transfer_s`, the bytes' own exposed time; `gpu_s`: the step if launching on the CPU
    cost nothing.
    """

    strategy: ParallelStrategy
    step_s: float
    total_s: float
    compute_s: float
    communication_s: float
    transfer_s: float
    gpu_s: float
    host_s: float
    fixed_s: float
    sent_bytes: float
    calls: int
    limits: str


def fixed_seconds(job: Job, card: Card, constants: Constants = DEFAULT) -> float:
    """Text encoder and autoencoder, once per request, on one card."""
    f = job.model.family
    decoder = f.decoder_flop * job.width * job.height * job.frames * job.batch
    text = 2 * f.text_encoder * job.text_tokens * job.prompts
    return (decoder + text) / (card.tflops * 1e12 * constants.decoder)


def one_gpu_step(job: Job, card: Card, constants: Constants = DEFAULT) -> float:
    """Seconds of one step on one card, from its peak rate: the least certain prediction; measure when you can."""
    rate = (
        card.tflops * 1e12 * (constants.compiled if job.model.compute_options.compiles else constants.eager)
    )
    return job.flop / rate


def predict(
    job: Job,
    strategy: ParallelStrategy,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    one_gpu_s: float | None = None,
    with_fixed: bool = True,
) -> Prediction:
    """Predicts `strategy`. `one_gpu_s`: measured seconds of one step on one card, in place of the peak-rate guess."""
    s, f = strategy, job.model.family
    alone = one_gpu_s or one_gpu_step(job, machine.card, constants)
    # Reading the weights takes as long for few tokens as for many; the rest of the time scales with the share.
    reading = min(job.model.weight_bytes / (machine.card.bandwidth * 1e9), alone / 2)
    share = compute_share(job, strategy)
    compute = (alone - reading) * share
    compute += reading * s.pipeline_patches / (s.pipefusion_degree**2 * s.tensor_degree)
    if s.pipefusion_degree > 1:
        compute /= constants.pipeline
    host = (
        min(f.block_count * constants.host_block_s, alone) if not job.model.compute_options.compiles else 0.0
    )
    host *= s.pipeline_patches / s.pipefusion_degree

    attention = alone * share * job.flop_parts[1] / job.flop
    transfer, latencies, launches, calls, sent = 0.0, 0.0, 0, 0, 0.0
    for e in exchanges(job, strategy):
        load = unit_load(machine.link, s, e.kind)
        seconds = e.sent * machine.link.seconds(
            load, _reached(machine.link, constants), constants.reached_outside
        )
        latency = constants.call_s
        if e.kind == "ring":
            latency = constants.hop_s
            # The last piece of attention has nothing left to hide.
            covered = attention * (s.ring_degree - 1) / s.ring_degree
            seconds -= constants.ring_overlap * min(seconds, covered)
            launches += 2 * e.calls  # send and receive, another attention call, the merge
        elif e.kind in ("pipefusion", "weights"):
            seconds = max(0.0, seconds - compute)  # sent ahead of its use, while something else computes
        transfer += seconds
        latencies += e.calls * latency
        launches += e.calls
        calls += e.calls
        sent += e.sent
    communication = transfer + latencies
    if not job.model.compute_options.compiles:
        host += launches * constants.host_call_s
    step = max(compute + communication, host)
    fixed = fixed_seconds(job, machine.card, constants) if with_fixed else 0.0
    # Warm-up steps of PipeFusion go through the stages one after the other.
    warm_up = min(s.warmup_steps, job.steps) * (s.pipefusion_degree - 1) * compute
    denoising = job.steps * step + warm_up
    denoising_gpu = job.steps * (compute + communication) + warm_up
    return Prediction(
        strategy=strategy,
        step_s=denoising / job.steps,
        total_s=denoising + fixed,
        compute_s=compute,
        communication_s=communication,
        transfer_s=transfer,
        gpu_s=denoising_gpu / job.steps,
        host_s=host,
        fixed_s=fixed,
        sent_bytes=sent,
        calls=calls,
        limits=_limits(compute, communication, host, s.world_size),
    )


def compute_share(job: Job, strategy: ParallelStrategy) -> float:
    """Share of the one-GPU arithmetic that the busiest rank does, with what does not divide rounded up."""
    s, f = strategy, job.model.family
    rows = -(-job.rows // s.row_degree) / job.rows
    tokens = job.image_tokens + job.text_tokens
    sequence = -(-tokens // s.sequence_degree) / tokens
    parts = s.ulysses_degree * s.tensor_degree
    heads = -(-f.heads // parts) * parts / f.heads  # heads that do not divide are padded
    stage = -(-f.block_count // s.pipefusion_degree) / f.block_count if f.block_count else 1.0
    return rows * sequence * max(1.0, heads) / s.tensor_degree * stage


def _reached(link: Interconnect, constants: Constants) -> float:
    return {
        "nvlink": constants.reached_nvlink,
        "pcie": constants.reached_pcie,
        "host": constants.reached_host,
        "network": constants.reached_outside,
    }[link.kind]


def _limits(compute: float, communication: float, host: float, world: int) -> str:
    if host > compute + communication:
        return "launching kernels on the CPU"
    if world > 1 and communication > compute:
        return "the links between the GPUs"
    if world > 1 and communication > 0.2 * compute:
        return "arithmetic, and the links between the GPUs"
    return "arithmetic"


# A share of a nominal rate: below, something else than the link was measured; above, NVML knew too low a rate.
_LEAST, _MOST = 1e-4, 2.0


def measured_constants(
    ranks: Sequence[Calibration], link: Interconnect, constants: Constants = DEFAULT
) -> Constants:
    """`constants` with the links as `ranks` measured them: the share of `link`'s rates that is reached, and the
    latency of a collective.

    The link keeps its levels: both shares, within and across sockets, are scaled by how far the all-to-all (else the
    ring) over the calibrated groups was off.
    """
    strategy, world = ranks[0].strategy, len(ranks)
    if world == 1:
        return constants
    inside = f"reached_{link.kind if link.kind != 'network' else 'outside'}"
    known = {f.name: getattr(constants, f.name) for f in fields(constants)}
    for kind, axis in ((ALL_TO_ALL, "ulysses"), (POINT_TO_POINT, "ring")):
        rate = slowest_rate(tuple(ranks), kind)
        if rate is None:
            continue
        # Where the strategy has no such axis, all ranks were measured together.
        all_ranks = ParallelStrategy().replace(**{f"{axis}_degree": world})
        over = strategy if getattr(strategy, f"{axis}_degree") > 1 else all_ranks
        predicted = link.seconds(unit_load(link, over, axis), known[inside], constants.reached_outside)
        factor = predicted * rate  # seconds predicted for one byte, over those measured
        changed = {
            name: min(max(known[name] * factor, _LEAST), _MOST) for name in {inside, "reached_outside"}
        }
        return constants.replace(**changed, call_s=median(c.collective_s for c in ranks))
    return constants.replace(call_s=median(c.collective_s for c in ranks))
