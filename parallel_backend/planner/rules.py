"""Picks a strategy for a job and says why: by hand, by measurements, else "CFG, then Ulysses, then Ring"."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import StrategyError
from ..layout import crosses_machines
from ..machine.device_shares import read_shares, unequal_remark
from ..strategy import ENGINES, ParallelStrategy
from .candidates import APPROXIMATION, Ranking, queries_pay
from .workload.workload import Job

MODES = ("auto", "manual")


@dataclass(frozen=True)
class StrategySettings:
    """The settings of StrategySelector.

    `devices` as in devices.resolve_devices; `strategy` counts in `manual`; `device_shares` as in
    device_shares.read_shares, in both modes; `approximation` as in candidates.rank_candidates, in `auto`.
    `compared`: a run of a comparison with one device. `auto` then splits the job and tries nothing on the way; one
    device set by hand is the first of a group whose others wait.
    """

    mode: str = "auto"
    devices: str = "all"
    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    engine: str = "auto"
    device_shares: str = ""
    approximation: str = "if_needed"
    compared: bool = False

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("engine", ENGINES), ("approximation", APPROXIMATION)):
            if (value := getattr(self, name)) not in known:
                told = f"{name} {value!r} is unknown; choose one of {', '.join(known)}."
                raise StrategyError(told, inputs=(name,))


@dataclass(frozen=True)
class Decision:
    """The strategy that will run, the engine wished for, the reason in words, and what was resolved on the way."""

    strategy: ParallelStrategy
    engine: str
    reason: str
    notes: tuple[str, ...] = ()


def resolve_strategy(
    settings: StrategySettings, job: Job, devices: tuple[str, ...], ranking: Ranking | None = None
) -> Decision:
    """The strategy for `job` on `devices`. Raises StrategyError with every rule that a manual one breaks.

    `ranking`: what fits and what was measured of this job; where it says nothing `auto` follows the rule.
    """
    shares, describe = read_shares(settings.device_shares, devices), job.model.shape.describe
    if settings.mode == "auto":
        strategy, reason = _by_rule(job, len(devices))
        if ranking is not None and ranking.ranked:
            same = strategy == ranking.best.strategy and not ranking.reason
            strategy = ranking.best.strategy
            reason = (
                reason if same else ranking.reason or f"{describe(strategy)}: the rule, as far as memory goes"
            )
        said = [] if ranking is None else list(ranking.notes)
        strategy, notes = _with_shares(strategy, shares)
        return Decision(strategy, settings.engine, reason, tuple(said + notes + _remarks(strategy, devices)))
    strategy, notes = _resolve_weights(settings.strategy)
    strategy.check(job.model.shape, len(devices), settings.engine, as_set=settings.strategy)
    strategy, moved = _resolve_conflicts(strategy, job)
    strategy, shared = _with_shares(strategy, shares)
    notes += moved + shared + _remarks(strategy, devices)
    if strategy.world_size < len(devices):
        notes.append(
            f"{len(devices) - strategy.world_size} of the {len(devices)} selected devices have nothing to "
            f"do: {describe(strategy)} uses {strategy.world_size}."
        )
    return Decision(strategy, settings.engine, f"{describe(strategy)}: set by hand", tuple(notes))


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
    """For a model whose tokens stay together: each device takes whole rows, as far as there are any."""
    ways = [
        ParallelStrategy(cfg_degree=cfg, data_degree=max(1, min(job.batch, count // cfg)))
        for cfg in ((2, 1) if job.has_cfg else (1,))
    ]
    strategy = max(ways, key=lambda way: way.world_size)  # the first of equals
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


def _resolve_weights(strategy: ParallelStrategy) -> tuple[ParallelStrategy, list[str]]:
    """Ways to hold the weights that do not go together: the one that saves more stays."""
    notes = []
    if strategy.pipefusion_degree > 1 and strategy.shards:
        notes.append(
            f"shard_weights and offload_weights are off: with pipefusion_degree {strategy.pipefusion_degree} each "
            f"device holds its own blocks only, whole."
        )
        strategy = strategy.replace(shard_weights=False, offload_weights=False)
    if strategy.pipefusion_degree > 1 and strategy.tensor_degree > 1:
        freed = strategy.tensor_degree
        notes.append(
            f"tensor_degree {freed} became part of pipefusion_degree {strategy.pipefusion_degree * freed}: layers are "
            f"not split within the stages of a pipeline."
        )
        strategy = strategy.replace(tensor_degree=1, pipefusion_degree=strategy.pipefusion_degree * freed)
    return strategy, notes


def _with_shares(strategy: ParallelStrategy, shares: tuple[float, ...]) -> tuple[ParallelStrategy, list[str]]:
    """`shares` name a share for each selected device; the strategy may use fewer."""
    strategy = strategy.replace(device_shares=shares[: strategy.world_size])
    if not strategy.device_shares or strategy.sequence_degree * strategy.pipefusion_degree > 1:
        return strategy, []
    note = (
        f"device_shares changes nothing for {strategy.replace(device_shares=()).describe()}: whole images and layers "
        f"are split evenly; Ulysses, Ring and PipeFusion follow the shares."
    )
    return strategy.replace(device_shares=()), [note] if strategy.world_size > 1 else []


def _remarks(strategy: ParallelStrategy, devices: tuple[str, ...]) -> list[str]:
    """Remarks on what a strategy that can run will do worse than its owner may think."""
    remarks = []
    if strategy.pipefusion_degree > strategy.pipeline_patches:
        remarks.append(
            f"num_pipeline_patch {strategy.pipeline_patches} is less than pipefusion_degree "
            f"{strategy.pipefusion_degree}: some devices wait at every step; "
            f"{strategy.pipefusion_degree} or more keep all busy."
        )
    if crosses_machines(strategy, devices):
        remarks.append(
            "Ulysses, Ring or tensor parallelism crosses machines, and each block waits for the link between them; "
            "these inside, and CFG, data or PipeFusion across machines, send far less."
        )
    if not strategy.device_shares and (remark := unequal_remark(devices[: strategy.world_size])):
        remarks.append(remark)
    return remarks


def _resolve_conflicts(strategy: ParallelStrategy, job: Job) -> tuple[ParallelStrategy, list[str]]:
    """Degrees that this request gives nothing to do are moved to the sequence, so that no device idles."""
    notes = []
    images = "1 image" if job.batch == 1 else f"{job.batch} images"
    for name, useless, why in (
        (
            "cfg_degree",
            strategy.cfg_degree > 1 and not job.has_cfg,
            "has no CFG (cfg 1.0 ignores the negative prompt)",
        ),
        ("data_degree", strategy.data_degree > job.batch, f"has {images}"),
    ):
        if not useless:
            continue
        freed = getattr(strategy, name)
        ulysses, ring = strategy.ulysses_degree, strategy.ring_degree
        shape = job.model.shape
        if strategy.pipefusion_degree > 1 and not shape.tokens_in_stages:  # there is no place for them
            notes.append(f"{name} {freed} gains nothing: this request {why}. Set it to 1 to free devices.")
            continue
        if shape.splits_tokens:
            ulysses, ring = shape.split_sequence(strategy.sequence_degree * freed)
        before = shape.describe(strategy)
        strategy = strategy.replace(**{name: 1}, ulysses_degree=ulysses, ring_degree=ring)
        notes.append(
            f"{before} became {shape.describe(strategy)}: this request {why}, so {name} {freed} would idle."
        )
    return strategy, notes
