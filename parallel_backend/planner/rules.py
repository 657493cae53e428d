"""Resolves settings to a job's plan, with reasons: by hand, by measurements, else "CFG, then Ulysses, then Ring"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import StrategyError
from ..layout import crosses_machines
from ..machine.device_shares import read_shares, unequal_remark
from ..strategy import ENGINES, ParallelStrategy
from ..trials import NO_TRIALS, TrialPlan
from .candidates import APPROXIMATION, Candidate, Ranking, queries_pay
from .store import LinkRate
from .workload.fit import MemoryCheck
from .workload.rank_memory import NO_MEMORY, RankMemory
from .workload.workload import Job

MODES = ("auto", "manual")


@dataclass(frozen=True)
class StrategySettings:
    """The settings of StrategySelector.

    `devices`: as in devices.resolve_devices; `strategy`: used in `manual`; `device_shares`: as in
    device_shares.read_shares, in both modes; `approximation`: as in candidates.rank_candidates, in `auto`.
    `compared`: True for a run of a comparison with one device. `auto` then must split the job and tries no strategies;
    one device set by hand is the first of a group whose other ranks wait.
    """

    mode: str = "auto"
    devices: str = "all"
    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    engine: str = "auto"
    device_shares: str = ""
    approximation: str = "if_needed"
    compared: bool = False

    @property
    def fixes_order(self) -> bool:
        """True if the order of the listed devices must be kept."""
        return self.mode == "manual" or bool(self.device_shares)

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("engine", ENGINES), ("approximation", APPROXIMATION)):
            if (value := getattr(self, name)) not in known:
                problem = f"{name} {value!r} is unknown; choose one of {', '.join(known)}."
                raise StrategyError(problem, inputs=(name,))


@dataclass(frozen=True)
class Plan:
    """How a job will run. `devices`: one per rank, in rank order; `engine`: as requested; `reason`: why this strategy,
    in words; `notes`: what was changed or noticed; `memory`: predicted for the fullest rank, set once it was checked;
    `candidates`: all that were ranked; `trials`: other strategies that the job tries while it runs; `job`: with its
    options resolved (compile); `link`: the measured link of `devices`, None if it was never measured."""

    job: Job
    devices: tuple[str, ...]
    strategy: ParallelStrategy
    engine: str = "auto"
    reason: str = ""
    notes: tuple[str, ...] = ()
    memory: RankMemory = NO_MEMORY
    candidates: tuple[Candidate, ...] = ()
    trials: TrialPlan = NO_TRIALS
    link: LinkRate | None = None

    def note(self, *words: str) -> Plan:
        """Adds notes."""
        return replace(self, notes=(*self.notes, *words))

    def under(self, strategy: ParallelStrategy) -> Plan:
        """Returns the plan with another strategy."""
        return replace(self, strategy=strategy)

    @cached_property
    def check(self) -> MemoryCheck:
        """The plan's memory, to compare with the memory of its devices."""
        return MemoryCheck(self.job, self.strategy, self.devices)


def resolve_strategy(
    settings: StrategySettings,
    job: Job,
    devices: tuple[str, ...],
    ranking: Ranking | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Returns the plan for `job` on the first of `devices`, with its memory unchecked. Raises StrategyError with every
    rule that a strategy set by hand breaks.

    `ranking`: the job's candidates; if it is empty or None, `auto` follows the rule. `notes`: the plan's first notes.
    """
    shares, describe = read_shares(settings.device_shares, devices), job.model.shape.describe
    plan = Plan(job, devices, settings.strategy, settings.engine, notes=notes)
    if settings.mode == "auto":
        strategy, reason = _by_rule(job, len(devices))
        if ranking is not None and ranking.ranked:
            rule, strategy = strategy, ranking.best.strategy
            if ranking.reason or strategy != rule:
                reason = ranking.reason or f"{describe(strategy)}: the rule, as far as memory goes"
        plan = _remark(_with_shares(plan.under(strategy), shares))
    else:
        plan.strategy.check(job.model.shape, len(devices), settings.engine)
        plan = _remark(_with_shares(_resolve_conflicts(plan), shares))
        count, used = len(devices), plan.strategy.world_size
        reason = f"{describe(plan.strategy)}: set by hand"
        if used < count:
            plan = plan.note(
                f"{count - used} of the {count} selected devices have nothing to do: {describe(plan.strategy)} uses "
                f"{used}."
            )
    return replace(plan, reason=reason, devices=devices[: plan.strategy.world_size])


def _by_rule(job: Job, count: int) -> tuple[ParallelStrategy, str]:
    if count == 1:
        return ParallelStrategy(), "one device is selected"
    shape = job.model.shape
    if not shape.splits_tokens:
        return _rows_by_rule(job, count)
    heads = shape.heads
    cfg = 2 if job.has_cfg and count % 2 == 0 else 1
    ulysses, ring = shape.split_sequence(int(min(count // cfg, job.most_bands)))
    strategy = ParallelStrategy(cfg_degree=cfg, ulysses_degree=ulysses, ring_degree=ring)
    because = [f"{count} devices are selected"]
    if cfg == 2:
        because.append("the request has a negative prompt (CFG 2 halves the work and moves almost nothing)")
    if shape.band_rows and ulysses > 1:
        because.append(f"{ulysses} devices compute a band of each image's rows")
    elif ulysses > 1:
        verb = "divides" if not heads % ulysses else "shares out"
        because.append(
            f"Ulysses {ulysses} {verb} the {heads} attention heads" if heads else f"Ulysses {ulysses}"
        )
    if ring > 1:
        because.append(
            f"Ring {ring} takes the rest, which does not divide the {heads} attention heads"
            if ulysses > 1
            else f"the {heads} attention heads do not divide by {ring}, which Ring does not need"
        )
    return strategy, f"{shape.describe(strategy)}: " + "; ".join(because)


def _rows_by_rule(job: Job, count: int) -> tuple[ParallelStrategy, str]:
    """Applies the rule to a model whose tokens stay together: each device takes whole rows, if there are enough."""
    strategies = [
        ParallelStrategy(cfg_degree=cfg, data_degree=max(1, min(job.batch, count // cfg)))
        for cfg in ((2, 1) if job.has_cfg else (1,))
    ]
    strategy = max(strategies, key=lambda one: one.world_size)  # the first of equals
    because = [
        f"{count} devices are selected",
        f"the tokens of one image of {job.model.shape.name} cannot be shared out, only whole images and prompts",
    ]
    queries = count // strategy.world_size
    if queries > 1 and queries_pay(job):
        strategy = strategy.replace(ulysses_degree=queries)
        because.append(
            f"attention takes {job.attention_share:.0%} of the arithmetic, and {queries} devices share out its queries"
        )
    if strategy.world_size < count:
        because.append(f"{count - strategy.world_size} of the devices have nothing to do")
    return strategy, f"{strategy.describe()}: " + "; ".join(because)


def _with_shares(plan: Plan, shares: tuple[float, ...]) -> Plan:
    """Adds `shares` to the strategy: one for each selected device, of which the strategy may use fewer."""
    strategy = plan.strategy.replace(device_shares=shares[: plan.strategy.world_size])
    if not strategy.device_shares or strategy.sequence_degree * strategy.pipefusion_degree > 1:
        return plan.under(strategy)
    even = strategy.replace(device_shares=())
    if even.world_size == 1:
        return plan.under(even)
    return plan.under(even).note(
        f"device_shares changes nothing for {even.describe()}: whole images and layers are split evenly; Ulysses, Ring "
        f"and PipeFusion follow the shares."
    )


def _remark(plan: Plan) -> Plan:
    """Adds notes on how a valid strategy will be slower than expected."""
    strategy = plan.strategy
    if strategy.pipefusion_degree > strategy.pipeline_patches:
        plan = plan.note(
            f"num_pipeline_patch {strategy.pipeline_patches} is less than pipefusion_degree "
            f"{strategy.pipefusion_degree}: some devices wait at every step; "
            f"{strategy.pipefusion_degree} or more keep all busy."
        )
    if crosses_machines(strategy, plan.devices):
        plan = plan.note(
            "Ulysses, Ring or tensor parallelism crosses machines, and each block waits for the link between them; "
            "these inside, and CFG, data or PipeFusion across machines, send far less."
        )
    used = plan.devices[: strategy.world_size]
    if not strategy.device_shares and (remark := unequal_remark(used)):
        plan = plan.note(remark)
    return plan


def _resolve_conflicts(plan: Plan) -> Plan:
    """Moves degrees that have no work in this request to the sequence axes, so that no device idles."""
    job, shape = plan.job, plan.job.model.shape
    images = "1 image" if job.batch == 1 else f"{job.batch} images"
    no_cfg = plan.strategy.cfg_degree > 1 and not job.has_cfg
    for name, useless, why in (
        ("cfg_degree", no_cfg, "has no CFG (cfg 1.0 ignores the negative prompt)"),
        ("data_degree", plan.strategy.data_degree > job.batch, f"has {images}"),
    ):
        if not useless:
            continue
        strategy = plan.strategy
        freed = getattr(strategy, name)
        ulysses, ring = strategy.ulysses_degree, strategy.ring_degree
        if shape.splits_tokens:
            ulysses, ring = shape.split_sequence(strategy.sequence_degree * freed)
        moved = strategy.replace(**{name: 1}, ulysses_degree=ulysses, ring_degree=ring)
        plan = plan.under(moved).note(
            f"{shape.describe(strategy)} became {shape.describe(moved)}: this request {why}, so {name} {freed} would "
            f"idle."
        )
    return plan
