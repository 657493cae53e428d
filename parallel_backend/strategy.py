"""ParallelStrategy, which owns every degree, and the rules that a strategy must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .errors import Nearest, Problem, StrategyError

ENGINES = ("auto", "native", "xfuser")
MAX_SHARE = 1e15  # per device: shares may be bytes of memory; the sum of far larger numbers overflows
# Labels in reports, in the order of the rank layout (slowest axis first).
_LABELS = {
    "data_degree": "data",
    "cfg_degree": "CFG",
    "pipefusion_degree": "PipeFusion",
    "ring_degree": "Ring",
    "ulysses_degree": "Ulysses",
    "tensor_degree": "tensor",
}
DEGREES = tuple(_LABELS)
_NEAREST = (*DEGREES, "shard_weights", "offload_weights")  # fields that the nearest valid strategy may change


@dataclass(frozen=True)
class ModelShape:
    """The facts about a model that the rules need. `heads`: attention heads, 0 if unknown; `blocks`: all transformer
    blocks; `splits_tokens`: True if the tokens of one image can be split, not only whole rows; `splits_queries`: True
    if only attention's queries can be; `splits_layers`: True if each layer's heads and columns can be split;
    `splits_layers_unasked`: True if `auto` may choose that; `pipelines`: True if blocks can be on different devices;
    `sends_tokens`: True if two Ulysses ranks can send tokens before they are projected; `band_rows`: if ranks compute
    bands of an image's rows, the least number of latent rows in a band, else 0."""

    heads: int
    blocks: int
    name: str = "the model"
    splits_tokens: bool = True
    splits_queries: bool = False
    splits_layers: bool = True
    splits_layers_unasked: bool = True
    pipelines: bool = True
    sends_tokens: bool = False
    band_rows: int = 0

    def takes_ulysses(self, degree: int) -> bool:
        """Returns True if each of `degree` ranks can have a head; ranks may have different numbers of heads."""
        return self.heads == 0 or degree <= self.heads

    def describe(self, strategy: ParallelStrategy) -> str:
        """Returns the strategy in words, naming what it splits of this model."""
        return strategy.describe(bands=self.band_rows > 0)

    def split_sequence(self, count: int) -> tuple[int, int]:
        """Returns (ulysses_degree, ring_degree) for `count` devices, with the largest Ulysses degree that the heads
        allow; (1, 1) if only whole rows can be split."""
        if not self.splits_tokens:
            return 1, 1
        ulysses = max(d for d in range(1, count + 1) if count % d == 0 and self.takes_ulysses(d))
        return ulysses, count // ulysses


@dataclass(frozen=True)
class ParallelStrategy:
    """The split of one sampling job. Every degree is >= 1; `world_size` is their product.

    Rank layout, slowest axis first: data, cfg, pipefusion, ring, ulysses, tensor; neighbours on the
    ulysses axis have adjacent ranks, because all-to-all wants the fastest links.

    `num_pipeline_patch`: patches per image under PipeFusion, 0 for one per stage; `warmup_steps`: exact PipeFusion
    steps before it uses the keys and values of the previous step; `shard_weights`: True if each rank stores a shard of
    the weights and gathers a block when needed (FSDP); `offload_weights`: True if those shards are in host memory;
    `device_shares`: each rank's relative share of an image's tokens or of the model's blocks, empty for equal shares;
    `head_groups`: groups of heads in Ulysses, one of which is exchanged while another is attended to;
    `sends_tokens`: True if two Ulysses ranks exchange tokens before the projection instead of queries, keys and values.
    """

    data_degree: int = 1
    cfg_degree: int = 1
    pipefusion_degree: int = 1
    ring_degree: int = 1
    ulysses_degree: int = 1
    tensor_degree: int = 1
    shard_weights: bool = False
    offload_weights: bool = False
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    device_shares: tuple[float, ...] = ()
    head_groups: int = 1
    sends_tokens: bool = False

    def __post_init__(self) -> None:
        for name in (*DEGREES, "head_groups"):
            _check_integer(name, getattr(self, name), 1)
        for name in ("num_pipeline_patch", "warmup_steps"):
            _check_integer(name, getattr(self, name), 0)
        shares = tuple(float(value) for value in self.device_shares)
        if not all(0 < value <= MAX_SHARE for value in shares):
            raise StrategyError(
                f"device_shares is {', '.join(f'{v:g}' for v in shares)}; each must be a number above 0"
                f"{f' and at most {MAX_SHARE:g}' if any(value > MAX_SHARE for value in shares) else ''}.",
                inputs=("device_shares",),
            )
        object.__setattr__(self, "device_shares", () if len(set(shares)) <= 1 else shares)

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, name) for name in DEGREES)

    @property
    def row_degree(self) -> int:
        """Number of rank groups that split whole images (batch entries, cond and uncond)."""
        return self.data_degree * self.cfg_degree

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that split the tokens of one image."""
        return self.ring_degree * self.ulysses_degree

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same part of the model, unless weights are sharded."""
        return self.row_degree * self.sequence_degree

    def describe(self, *, bands: bool = False) -> str:
        """Returns the strategy in words, e.g. `CFG 2 × Ulysses 2`; `one device` if nothing is split. `bands`: True if
        the sequence degrees split an image's rows into bands, which gives `CFG 2 × bands 2`."""
        labels, of = _LABELS, self
        if bands:
            labels = _LABELS | {"ulysses_degree": "bands"}
            of = self.replace(ring_degree=1, ulysses_degree=self.sequence_degree)
        parts = [f"{labels[n]} {getattr(of, n)}" for n in DEGREES if getattr(of, n) > 1]
        words = " × ".join(parts) or "one device"
        if self.head_groups > 1:
            words += f" in {self.head_groups} groups of heads"
        if self.sends_tokens:
            words += ", tokens sent"
        if self.offload_weights:
            words += ", weights sharded and kept in host memory"
        elif self.shard_weights:
            words += ", weights sharded"
        if self.device_shares:
            words += f", shares {' : '.join(f'{value:g}' for value in self.device_shares)}"
        return words

    @property
    def plain_exchange(self) -> ParallelStrategy:
        """The same split with Ulysses exchanging all heads at once, after the projection."""
        return self.replace(head_groups=1, sends_tokens=False)

    @property
    def pipeline_patches(self) -> int:
        """Number of patches of an image under PipeFusion; an image with fewer tokens has fewer."""
        return self.num_pipeline_patch or self.pipefusion_degree

    @property
    def exact(self) -> bool:
        """True unless PipeFusion is used: it computes with the previous step's keys and values."""
        return self.pipefusion_degree == 1

    @property
    def canonical(self) -> ParallelStrategy:
        """The normal form: equal for equal splits. Without stages, the patch and warm-up fields mean nothing."""
        if self.pipefusion_degree == 1:
            return self.replace(num_pipeline_patch=0, warmup_steps=1)
        is_usual = self.num_pipeline_patch == self.pipefusion_degree
        return self.replace(num_pipeline_patch=0) if is_usual else self

    @property
    def shards(self) -> bool:
        """True if weights are sharded over the ranks that would otherwise hold the same; offload implies it."""
        return self.shard_weights or self.offload_weights

    @property
    def weights(self) -> ParallelStrategy:
        """The part that decides which weights a rank holds: strategies with an equal part share the loaded model."""
        if self.pipefusion_degree > 1:
            return self.replace(num_pipeline_patch=0, warmup_steps=1)
        shards = self.offload_weights or (self.shard_weights and self.replicas > 1)
        if self.tensor_degree == 1 and not shards:
            return ParallelStrategy()
        return ParallelStrategy(
            data_degree=self.replicas,
            tensor_degree=self.tensor_degree,
            shard_weights=shards,
            offload_weights=self.offload_weights,
        )

    def problems(self, model: ModelShape, device_count: int, engine: str = "auto") -> list[Problem]:
        """Returns every rule that this strategy breaks, with the nearest valid setting; empty if it can run."""
        broken = list(self._broken(model, device_count, engine))
        if not broken:
            return []
        nearest = self.nearest(model, device_count)
        changes = tuple((n, v) for n in _NEAREST if (v := getattr(nearest, n)) != getattr(self, n))
        return [Problem(_with_nearest(words, inputs, changes), inputs, changes) for words, inputs in broken]

    def nearest(self, model: ModelShape, device_count: int) -> ParallelStrategy:
        """Returns the strategy that keeps every rule, uses as many devices as this one if it can, and changes least. No
        degree rises except Ring's, which may take over from Ulysses."""
        base = self.replace(device_shares=())
        if self.pipefusion_degree > 1 and self.shards:
            base = base.replace(shard_weights=False, offload_weights=False)
        most = {name: getattr(self, name) for name in DEGREES} | {"ring_degree": self.sequence_degree}
        degrees: list[tuple[int, ...]] = [()]
        for name in DEGREES:
            degrees = [
                (*way, degree)
                for way in degrees
                for degree in range(1, min(most[name], device_count // math.prod(way)) + 1)
            ]
        found = [base.replace(**dict(zip(DEGREES, way, strict=True))) for way in degrees]
        valid = [
            way
            for way in found
            if way.sequence_degree <= self.sequence_degree
            and not any(way._broken(model, device_count, "auto"))
        ]
        return max(valid, key=lambda way: (way.world_size, -self._distance(way)), default=self)

    def _distance(self, other: ParallelStrategy) -> float:
        return sum(abs(math.log2(getattr(other, name) / getattr(self, name))) for name in DEGREES)

    def _broken(
        self, model: ModelShape, device_count: int, engine: str
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields (words, inputs) for each broken rule; {nearest} and {steps} stand for the nearest valid setting."""
        if self.world_size > device_count:
            split = tuple(name for name in DEGREES if getattr(self, name) > 1)
            yield (
                f"{self.describe()} needs {self.world_size} devices; {device_count} "
                f"{'is' if device_count == 1 else 'are'} selected. Set {{steps}}, or choose more devices.",
                (*split, "devices"),
            )
        for words, *inputs in self._unknown_to(model):
            yield words, tuple(inputs)
        if model.splits_tokens and not model.takes_ulysses(self.ulysses_degree):
            yield (
                f"ulysses_degree {self.ulysses_degree} is more than the {model.heads} attention heads of "
                f"{model.name}; {{nearest}}.",
                ("ulysses_degree",),
            )
        if self.cfg_degree > 2:
            yield (
                f"cfg_degree {self.cfg_degree}: there are only two prompts to share out, positive and negative; "
                f"{{nearest}}.",
                ("cfg_degree",),
            )
        if model.pipelines and self.pipefusion_degree > model.blocks > 0:
            yield (
                f"pipefusion_degree {self.pipefusion_degree}: {model.name} has {model.blocks} blocks and each device "
                f"needs one; {{nearest}}.",
                ("pipefusion_degree",),
            )
        heads_divide = not model.heads % self.ulysses_degree
        if model.splits_layers and heads_divide and model.heads % (self.ulysses_degree * self.tensor_degree):
            yield (
                f"tensor_degree {self.tensor_degree} times ulysses_degree {self.ulysses_degree} does not divide the "
                f"{model.heads} attention heads of {model.name}; {{nearest}}.",
                ("tensor_degree",),
            )
        if self.pipefusion_degree > 1 and self.tensor_degree > 1:
            yield (
                f"pipefusion_degree {self.pipefusion_degree} with tensor_degree {self.tensor_degree}: the layers of a "
                f"pipeline's stages are not split yet; the nearest valid settings are tensor_degree 1, or "
                f"pipefusion_degree 1.",
                ("pipefusion_degree", "tensor_degree"),
            )
        if self.pipefusion_degree > 1 and self.shards:
            switches = tuple(name for name in ("shard_weights", "offload_weights") if getattr(self, name))
            yield (
                f"pipefusion_degree {self.pipefusion_degree} with {'shard' if self.shard_weights else 'offload'}"
                f"_weights: the stages of a pipeline are not sharded yet, each holds its blocks whole; the nearest "
                f"valid settings are shard_weights and offload_weights off, or pipefusion_degree 1.",
                ("pipefusion_degree", *switches),
            )
        whole_model = self.tensor_degree == self.pipefusion_degree == 1
        if self.sends_tokens and not (model.sends_tokens and self.ulysses_degree == 2 and whole_model):
            yield (
                f"sends_tokens: {model.name} has no layers for it, or devices are not two with whole models each; the "
                f"nearest valid setting is without it.",
                ("sends_tokens",),
            )
        if self.device_shares and len(self.device_shares) != self.world_size:
            yield (
                f"device_shares names {len(self.device_shares)} shares and {self.describe()} uses {self.world_size} "
                f"devices; name one share for each.",
                ("device_shares",),
            )
        if engine not in ENGINES:
            yield f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}.", ("engine",)

    def _unknown_to(self, model: ModelShape) -> Iterator[tuple[str, ...]]:
        """Yields (words, inputs…) for each kind of split that this model does not support."""
        if self.sequence_degree > 1 and not (model.splits_tokens or model.splits_queries):
            inputs = [name for name in ("ring_degree", "ulysses_degree") if getattr(self, name) > 1]
            yield (
                f"{' with '.join(f'{name} {getattr(self, name)}' for name in inputs)}: the tokens of one image of "
                f"{model.name} cannot be shared out, only whole images and prompts; the nearest valid settings are "
                f"ring_degree 1 and ulysses_degree 1, with cfg_degree 2 for a negative prompt or data_degree for a "
                f"batch.",
                *inputs,
            )
        if self.pipefusion_degree > 1 and not model.pipelines:
            yield (
                f"pipefusion_degree {self.pipefusion_degree}: the blocks of {model.name} cannot be laid out over "
                f"devices yet; the nearest valid setting is pipefusion_degree 1, with shard_weights where the model is "
                f"larger than a device.",
                "pipefusion_degree",
            )
        if self.tensor_degree > 1 and not model.splits_layers:
            yield (
                f"tensor_degree {self.tensor_degree}: the layers of {model.name} cannot be split; the nearest valid "
                f"setting is tensor_degree 1, with shard_weights where the model is larger than a device.",
                "tensor_degree",
            )

    def violations(self, model: ModelShape, device_count: int, engine: str = "auto") -> list[str]:
        """Returns the messages of `problems`."""
        return [problem.message for problem in self.problems(model, device_count, engine)]

    def check(self, model: ModelShape, device_count: int, engine: str = "auto") -> None:
        """Raises StrategyError listing every broken rule."""
        found = self.problems(model, device_count, engine)
        if found:
            lines = "\n".join(f"- {problem.message}" for problem in found)
            raise StrategyError(f"This strategy cannot run:\n{lines}", problems=tuple(found))

    def replace(self, **changes: Any) -> ParallelStrategy:
        return replace(self, **changes)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StrategyError(
            f"{name} is {value!r}; it must be a whole number of at least {least}.", inputs=(name,)
        )


def _with_nearest(words: str, inputs: tuple[str, ...], changes: Nearest) -> str:
    """Fills {nearest} and {steps} in `words` with the changes; changes of `inputs` come first."""
    ordered = sorted(changes, key=lambda change: change[0] not in inputs)
    setting = ", ".join(f"{name} {value}" for name, value in ordered)
    steps = ", ".join(f"{name} to {value}" for name, value in ordered)
    return words.replace("{nearest}", f"the nearest valid setting is {setting}").replace("{steps}", steps)
