"""The execution plan of a job, from a person's settings, measurements, memory, and trials within the job."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..devices import devices_of_a_run, is_cpu
from ..errors import StrategyError
from ..layout import crosses_machines
from ..machine.local import LOWVRAM, NOVRAM, LocalMachine, largest_joinable_count, order_devices
from ..requests import SampleRequest
from ..sidecar.group.failures import FAILING, left_out
from ..strategy import ParallelStrategy
from .candidates import Candidate, Ranking, enumerate_candidates, rank_candidates
from .history import MeasurementHistory
from .rules import Plan, StrategySettings, resolve_strategy
from .trials import plan_trials
from .workload.checkpoint_model import CheckpointModel
from .workload.fit import Capacity, MemoryCheck, check_capacity, cut_by_memory, fits
from .workload.workload import Job

# Share of a card's memory that `auto` plans with; the rest covers fragmentation and the desktop.
USABLE_MEMORY = 0.94
_SLICES = "NCCL does not join MIG slices of one GPU, so not all can be used; list one slice of each GPU first"

CapacityOf = Callable[[tuple[str, ...]], Capacity]


def job_from_request(model: CheckpointModel, request: SampleRequest) -> Job:
    """Returns the job of a SampleRequest."""
    return job_from_latent(
        model,
        request.noise.shape,
        text=request.positive.context.shape[1],
        has_cfg=len(request.prompts) == 2,
        steps=len(request.sigmas) - 1,
    )


def job_from_latent(
    model: CheckpointModel,
    latent_shape: Sequence[int],
    *,
    text: int,
    has_cfg: bool,
    steps: int,
    references: Sequence[Sequence[int]] = (),
) -> Job:
    """Returns the job of denoising latents of images [B, C, h, w], videos [B, C, T, h, w] or sound [B, C, L], treated
    as one row. `text`: tokens of the prompt; `references`: shapes of the reference latents that the model also gets."""
    width, height, frames = _size(model, latent_shape)
    return Job(
        model,
        width=width,
        height=height,
        frames=frames,
        batch=latent_shape[0],
        prompts=2 if has_cfg else 1,
        steps=max(1, steps),
        text=text,
        reference_tokens=sum(model.family.image_tokens(*_size(model, shape)) for shape in references),
    )


def _size(model: CheckpointModel, latent_shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns (width and height in pixels, latent frames)."""
    _, _, *sides = latent_shape
    *frames, height, width = (1, *sides) if len(sides) == 1 else sides
    pixels = model.family.latent_pixels
    return width * pixels, height * pixels, math.prod(frames)


def find_machine(devices: str, *, in_order: bool = False, memory_flag: str = "") -> LocalMachine:
    """Returns the selected devices in rank order. `in_order`: True keeps the listed order; else well-connected devices
    are adjacent and failing ones left out. `memory_flag`: as in LocalMachine. Raises DeviceError."""
    named = devices_of_a_run(devices)
    if in_order:
        return LocalMachine(named, memory_flag=memory_flag)
    failing = FAILING.among(named)
    sound = tuple(device for device in named if device not in failing)
    return LocalMachine(order_devices(sound), failing, memory_flag)


def plan_execution(
    settings: StrategySettings,
    job: Job,
    machine: LocalMachine,
    history: MeasurementHistory | None,
    *,
    tries: bool = False,
) -> Plan:
    """Returns the plan for `job`. Raises StrategyError before any rank is started.

    `history`: of the machine's devices; None lets the rule decide. `tries`: True if the job may try other strategies
    while it runs.
    """
    engine = "xfuser" if settings.engine == "xfuser" else "native"
    measured = {} if history is None else history.steps(job, engine)
    count = len(machine.devices)
    automatic = settings.mode == "auto"
    if automatic and history is not None and not settings.device_shares:
        count = largest_joinable_count(history.topology, count)
    selected = machine.devices[:count]
    capacity_of = functools.cache(Capacity.of)  # once a plan: each card is asked for what is in use
    known = list(_candidates(job, selected, settings.engine, measured, capacity_of))
    ranking = Ranking()
    if automatic:
        among = _split(known, count) if settings.compared else known
        ranking = rank_candidates(
            among, approximation=settings.approximation, describe=job.model.shape.describe
        )
    failing = (left_out(machine.failing),) if machine.failing else ()
    plan = resolve_strategy(settings, job, selected, ranking, notes=failing)
    if count < len(machine.devices):
        plan = plan.note(_SLICES)
    if automatic:
        plan = _economical(plan, machine.memory_flag, capacity_of)
        if not fits(plan.check, capacity_of(plan.check.devices)):
            plan = _offloaded(plan, "nothing faster fits in the memory of these devices", capacity_of)
    plan = _cut_to_fit(plan, capacity_of)
    plan = replace(plan, memory=check_capacity(plan.check, capacity_of(plan.check.devices)))
    if settings.compared:
        plan = replace(plan, devices=_compared_devices(plan.check, selected))
    candidates = ranking.ranked
    if not candidates:  # set by hand: that one first, then those that could replace it
        chosen = plan.strategy.canonical
        even = chosen.replace(device_shares=())
        others = (replace(c, permitted=c.strategy.exact) for c in known if c.strategy != even)
        candidates = Candidate(chosen, plan.memory.private_bytes, step_s=measured.get(chosen)), *others
    plan = replace(plan, candidates=candidates)
    if history is not None and not is_cpu(plan.devices):  # CPU ranks share cores, so a link says too little
        plan = replace(plan, link=history.link(plan.strategy.world_size))
    tries = tries and automatic and not settings.compared
    if tries and history is not None and history.store.path is not None:
        first, trials = plan_trials(plan.strategy, plan.candidates, job, history, engine)
        plan = replace(_begins_with(first, plan), trials=trials)
    return plan


def _candidates(
    job: Job,
    devices: tuple[str, ...],
    engine: str,
    measured: Mapping[ParallelStrategy, float],
    capacity_of: CapacityOf,
) -> Iterator[Candidate]:
    """Yields every strategy that this version runs on some of `devices`, with its memory and measured time. Variants of
    Ulysses's exchange are included only if measured."""
    by_exchange = (strategy for strategy in measured if strategy != strategy.plain_exchange)
    for strategy in (*enumerate_candidates(job, len(devices)), *by_exchange):
        violations = strategy.violations(job.model.shape, len(devices), engine)
        if violations or crosses_machines(strategy, devices):
            continue
        check = MemoryCheck.on(job, strategy, devices)
        seconds = measured.get(strategy)
        # A measured strategy fits, whatever was predicted. With patches it may not: measurements do not record them.
        seen = seconds is not None and not job.patch_bytes
        has_room = seen or fits(check, capacity_of(check.devices), share=USABLE_MEMORY)
        yield Candidate(strategy, check.fullest.private_bytes, has_room, seconds)


def _begins_with(first: ParallelStrategy, plan: Plan) -> Plan:
    """Returns the plan with `first` as its first strategy; the job tries the rule's strategy later."""
    if first == plan.strategy:
        return plan
    describe = plan.job.model.shape.describe
    rule = describe(plan.strategy)
    because = f"each device takes whole images, which is no more work than {rule} and sends less"
    if first.world_size == 1:
        because = f"processes on a CPU share its cores, so {rule} must show first that it gains"
    return replace(plan, strategy=first, reason=f"{describe(first)}: {because}")


def _split(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Returns the strategies on more than one device, for a comparison. Raises StrategyError if there are none."""
    found = [candidate for candidate in candidates if candidate.strategy.world_size > 1]
    if not found:
        selected = "1 device is" if count == 1 else f"{count} devices are"
        raise StrategyError(
            f"Nothing to compare one device with: {selected} selected and no strategy splits this job over more than "
            f"one. Select 2 devices or more; a model that only shares out whole images needs a batch or a negative "
            f"prompt.",
            inputs=("devices",),
        )
    return found


def _compared_devices(check: MemoryCheck, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Returns one device per rank for both sides of a comparison. Raises StrategyError before any rank starts if one
    device cannot hold the job."""
    if check.strategy.world_size == 1:
        return devices
    try:
        check_capacity(replace(check, strategy=ParallelStrategy(), devices=check.devices[:1]))
    except StrategyError as error:
        raise StrategyError(
            f"One device cannot run this job, so there is nothing to compare with. {error}"
        ) from None
    return check.devices


def _economical(plan: Plan, flag: str, capacity_of: CapacityOf) -> Plan:
    """Shards or offloads the weights if ComfyUI was started with a flag to save memory."""
    if flag == NOVRAM:
        return _offloaded(plan, f"ComfyUI runs with {flag}", capacity_of)
    if flag != LOWVRAM or not _copies(plan.strategy) or is_cpu(plan.devices):
        return plan
    shared = plan.under(plan.strategy.replace(shard_weights=True))
    return shared.note(f"shard_weights is on: ComfyUI runs with {flag}")


def _offloaded(plan: Plan, because: str, capacity_of: CapacityOf) -> Plan:
    """Returns the plan with weights in host memory, or unchanged if it does not fit that way."""
    strategy = plan.strategy
    if strategy.pipefusion_degree > 1 or is_cpu(plan.devices):
        return plan
    held = strategy.replace(shard_weights=_copies(strategy) > 0, offload_weights=True)
    offloaded = plan.under(held).note(f"offload_weights is on: {because}")
    return offloaded if fits(offloaded.check, capacity_of(offloaded.check.devices)) else plan


def _cut_to_fit(plan: Plan, capacity_of: CapacityOf) -> Plan:
    """Gives stages unequal numbers of blocks if they do not fit with equal ones."""
    capacity = capacity_of(plan.check.devices)
    if fits(plan.check, capacity):
        return plan
    moved = cut_by_memory(plan.check, capacity, share=USABLE_MEMORY) or cut_by_memory(plan.check, capacity)
    if moved is None:
        return plan
    # Each rank's share is the number of its stage's blocks.
    counts = moved.device_shares[: moved.pipefusion_degree * moved.sequence_degree : moved.sequence_degree]
    return plan.under(moved).note(
        f"PipeFusion's stages compute {', '.join(f'{count:g}' for count in counts)} blocks, since equal numbers do not "
        f"fit in the devices' memory. A step takes as long as the stage with the most work."
    )


def _copies(strategy: ParallelStrategy) -> int:
    """Returns how many extra copies of a device's weights exist, which sharding could avoid; 0 with PipeFusion."""
    return 0 if strategy.pipefusion_degree > 1 else strategy.replicas - 1
