"""One call of a ComfyUI module by all ranks: they share out rows and tokens, and each gets the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from ..errors import RequestError
from ..layout import slice_of
from ..models.attention import attention_by, attention_kernel
from ..models.base import ModuleModel
from ..models.tokens.rounded_drift import drift_in_words
from ..models.tokens.table import has_stages
from ..options import APPROXIMATE_KERNELS, AUTO, SAME
from ..requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, ModuleCall, Placement
from . import notes
from .attention import queries
from .attention.kernel_choice import kernel_for
from .attention.kernels import OVERRIDE, attend_by
from .attention.projections import OtherProjections
from .attention.sequence import SequenceAttention
from .attention.xfuser import UspAttention, XfuserEngine, why_not_xfuser
from .bands.unet import UNetBands
from .batch_rows import split_rows, take_rows
from .blocks.block_calls import BlockCalls, run_unmodified
from .blocks.compile import Compiler, start_compiler
from .blocks.step_cache import CachedCall, ModuleCache, ReuseVote
from .comm.collectives import all_gather
from .comm.groups import ALONE, Axis, Layout, Layouts
from .load import notes_on_weights
from .stages.stages import ModuleStages
from .stages.stale_keys import StaleKeyCache
from .tokens.region_blocks import are_known

_WITHIN = (
    "a node's code takes part within the model's blocks, of whose heads and layers each device has a part under "
    "tensor_degree; set tensor_degree to 1"
)
# ComfyUI's attention functions that are faster than torch's own; all others are torch's or slower.
_FASTER_ATTENTION = ("sage", "flash", "xformers")
# The output of a module: a tensor, or tensors and plain values in lists and tuples.
Answer = Any


def make_module_forward(model: ModuleModel, layouts: Layouts, placement: Placement) -> ModuleForward:
    """Returns the forward of `model` under `placement`. Collective: all ranks call it together."""
    strategy, name = placement.strategy, type(model.module).__name__
    if strategy.tensor_degree > 1 and not model.splits_layers:
        raise RequestError(
            f"tensor_degree {strategy.tensor_degree}: the layers of {name} cannot be split; set it to 1. shard_weights "
            f"can split the weights of any model."
        )
    if strategy.pipefusion_degree > 1 and not has_stages(name):
        raise RequestError(
            f"pipefusion_degree {strategy.pipefusion_degree}: the blocks of {name} cannot be laid out over devices; "
            f"set it to 1. data_degree, cfg_degree, ulysses_degree and ring_degree can split it."
        )
    return ModuleForward(model, layouts.get(strategy), placement)


class ModuleForward:
    """The forward of a module under a strategy: `forward(call)` returns the whole answer on every rank.

    The row axis (data x cfg) shares out rows, and the sequence axis (ring x ulysses) shares out tokens. If tokens must
    stay whole, the sequence axis shares out rows, bands of an image's rows, or the queries or heads of attention.
    """

    def __init__(self, model: ModuleModel, layout: Layout, placement: Placement) -> None:
        options, in_stages = placement.compute_options, layout.pipe.size > 1
        self.model, self.layout = model, layout
        is_shared_out = layout.row.size * layout.sequence.size * layout.tensor.size > 1
        self._is_exact = not (model.scales_by_largest and is_shared_out)
        self.noted = notes.Notes()
        if not self._is_exact:
            self.noted.add_lasting(notes.SCALES)
        if model.inseparable_rows and layout.row.size > 1:
            self.noted.add_lasting(notes.INSEPARABLE_ROWS)
        self.noted.add_lasting(*notes_on_weights(layout))
        # None if it was not requested or can compute nothing.
        self.xfuser = self._start_xfuser() if placement.engine == "xfuser" else None
        # The attention kernel that the user chose, instead of ComfyUI's own function.
        self._wish = options.attention if self.xfuser is None else AUTO
        self.kernel = "torch"  # over a ring, or chosen by the user; else ComfyUI's command line decides
        if self._wish != AUTO:  # raises RequestError if it cannot run here
            self.kernel = kernel_for(model.device, model.compute_dtype, self._wish).name
            self._is_exact = self._is_exact and self._wish not in APPROXIMATE_KERNELS
        if layout.ring.size > 1 and not in_stages:  # stages gather keys and do not run a ring
            kernel = kernel_for(model.device, model.compute_dtype, self._wish, ring=True)
            self.kernel = kernel.name
            self.noted.add_lasting(*kernel.notes)
            if model.attention in _FASTER_ATTENTION and kernel.name not in model.attention:
                self.noted.add_lasting(notes.RING.format(kernel=kernel.name, own=model.attention))
        self._exchange_dtype = options.exchange_dtype  # of the tensors that ranks exchange for attention
        self._compiler = self._start_compiler() if options.compiles else None  # None: blocks run uncompiled
        self._bands: UNetBands | None = None
        self._sends_tokens = layout.strategy.sends_tokens  # until a block does not allow it
        self.rounds = False  # True once an exchange of this request was rounded (exchange_dtype)
        self.stages: ModuleStages | None = None  # under PipeFusion
        if in_stages:
            alone = replace(layout, sequence=ALONE, ring=ALONE, ulysses=ALONE)  # all tokens on every rank
            self.stages = ModuleStages(model, layout, self._blocks, self._block_calls(alone))

    def _start_xfuser(self) -> XfuserEngine | None:
        """Makes blocks attend by xfuser if tokens are shared out; otherwise notes why not. Collective."""
        reason = why_not_xfuser(self.layout)
        if not reason and not self.model.regions:
            reason = f"the blocks of {type(self.model.module).__name__} are not described"
        if not reason:
            return XfuserEngine(self.layout, self.model.compute_dtype, self.noted.add)
        self.noted.add_lasting(f"engine xfuser fell back to native: {reason}")
        return None

    def _start_compiler(self) -> Compiler | None:
        """Returns what compiles blocks; notes which of them cannot be compiled."""
        compiler, faults = start_compiler(self.model.device.type)
        name, regions = type(self.model.module).__name__, self.model.regions
        is_known = are_known(self.model.module, regions)
        mixes = any(kind.whole for region in regions for kind in region.lists.values())
        if faults:
            self.noted.add_lasting(*faults)
        elif not is_known:
            self.noted.add_lasting(
                f"blocks ran uncompiled: which parts of {name} are its blocks is not described"
            )
        elif mixes and self.layout.sequence.size > 1:
            self.noted.add_lasting(
                f"some blocks of {name} run uncompiled where tokens are shared out: processes meet inside of them "
                f"outside of attention too"
            )
        return compiler if is_known else None

    def begin(self) -> None:
        """Begins a request: forgets what happened in the one before it."""
        self.noted.begin()
        self.rounds = False

    @property
    def notes(self) -> list[str]:
        """The notes on this request, worded for users."""
        return list(self.noted)

    @property
    def exact(self) -> bool:
        """True if its answers equal one device's, computed exactly."""
        return self._is_exact and not self.rounds

    @property
    def compiles(self) -> bool:
        return self._compiler is not None

    @property
    def engine(self) -> str:
        """The engine whose attention the last call used."""
        return "xfuser" if self.xfuser is not None and self.xfuser.attended else "native"

    @cached_property
    def _blocks(self) -> BlockCalls:
        return self._block_calls(self.layout)

    @property
    def bytes_sent(self) -> int:
        return self.layout.everyone.traffic.bytes_sent

    def __call__(
        self, call: ModuleCall, cache: ModuleCache | None = None, keys: StaleKeyCache | None = None
    ) -> Answer:
        """Computes a call. `cache`: the sampling job's step cache; `keys`: stores keys for the patches that follow."""
        chosen = nullcontext() if self._wish == AUTO else attention_kernel(partial(attend_by, self._wish))
        with chosen:
            try:
                return self._call(call, cache, keys)
            except OtherProjections as reason:  # raised on all ranks, in the first block
                self._sends_tokens = False
                self.noted.add_lasting(notes.PROJECTED.format(reason=reason))
                return self._call(call, cache, keys)

    def _call(self, call: ModuleCall, cache: ModuleCache | None, keys: StaleKeyCache | None) -> Answer:
        if self.stages is not None:
            return self._by_stages(self.stages, call, keys)
        if self.xfuser is not None:
            self.xfuser.prepare()
        sharding = self.model.byte_sharding
        with nullcontext() if sharding is None else sharding.call():
            self.model.begin_call()
            described = call.tokens in (STAY, BLOCK, ATTENTION) and self.model.regions
            if cache is None or not described:
                return self._answer(call)
            if not (outputs := self._blocks.cached_outputs()):
                return self._answer(call)
            key = (call.prompts, self.layout.strategy)
            shared = call.tokens == STAY and self.layout.sequence.size > 1
            vote = ReuseVote(self.layout, shared, (lambda: None) if sharding is None else sharding.rest)
            with cache.call(key, outputs, vote) as cached:
                return self._answer(call, cached)

    def _by_stages(self, stages: ModuleStages, call: ModuleCall, keys: StaleKeyCache | None) -> Answer:
        self.model.begin_call()
        answer = self._by_rows(call, (self.layout.row,), partial(stages.full_call, keys=keys))
        if self.layout.sequence.size > 1 and stages.shares_tokens:
            self._note_rounding()
        elif self.layout.sequence.size > 1:
            self.noted.add(notes.STAGE_REPEATS)
        return answer

    def _answer(self, call: ModuleCall, cached: CachedCall | None = None) -> Answer:
        if call.eager and not call.by_heads and self.layout.tensor.size > 1:
            raise RequestError(_WITHIN)
        if call.rows < 1:
            raise RequestError(f"a model call needs at least one row, and has {call.rows}.")
        if call.tokens == ROWS or self.layout.sequence.size == 1:
            compute = partial(self._compute_rows, cached=cached)
            return self._by_rows(call, (self.layout.row, self.layout.sequence), compute)
        if call.tokens == ATTENTION:
            why = notes.BY_CODE if call.careful else notes.UNDESCRIBED
            compute = partial(self._compute_queries, why=why, cached=cached)
            return self._by_rows(call, (self.layout.row,), compute)
        if call.tokens == BANDS:
            return self._by_rows(call, (self.layout.row,), self._compute_bands)
        compute = partial(self._compute_shared_out, self._blocks, cached)
        return self._by_rows(call, (self.layout.row,), compute)

    def _block_calls(self, layout: Layout) -> BlockCalls:
        if not self.model.regions:
            raise RequestError(
                f"The tokens of {type(self.model.module).__name__} cannot be shared out: which arguments of its blocks "
                f"are tokens is not described. Set ulysses_degree and ring_degree to 1."
            )
        run = run_unmodified if self._compiler is None else self._compiler.run_compiled
        uneven = partial(SequenceAttention, wish=self._wish, exchange_dtype=self._exchange_dtype)
        attention = uneven if self.xfuser is None else partial(UspAttention, self.xfuser)
        return BlockCalls(self.model, layout, run, attention)

    def _by_rows(
        self, call: ModuleCall, axes: Sequence[Axis], compute: Callable[[ModuleCall], Answer]
    ) -> Answer:
        """Returns the answer to all rows of `call`, split over the first axis and each share over the other axes.

        A rank without rows computes the first ones and discards the result: so it knows the shape of the answer to
        gather, and takes part in the gathers of sharded weights.
        """
        if not axes:
            return compute(call)
        axis, *others = axes
        if axis.size == 1:
            return self._by_rows(call, others, compute)
        part, shares = self.local_rows(call, axis)
        answer = self._by_rows(part, others, compute)
        return _gathered(answer, part.rows, shares, axis)

    def local_rows(self, call: ModuleCall, axis: Axis) -> tuple[ModuleCall, tuple[int, ...]]:
        """Returns (the call with this rank's rows, or with the first rank's if it has none; rows per rank)."""
        if call.joint_rows and call.rows > 1:
            self.noted.add(notes.JOINT_ROWS)
        shares = split_rows(call, axis.size, self._rows_are_inseparable(call))
        mine = slice_of(shares, axis.index)
        if mine.start == mine.stop:
            mine = slice(0, max(shares))
        return take_rows(call, mine), shares

    def _rows_are_inseparable(self, call: ModuleCall) -> bool:
        return call.inseparable or call.joint_rows or self.model.inseparable_rows

    def _compute(self, call: ModuleCall) -> Answer:
        return self.model.module(*call.args, **call.kwargs)

    def _compute_rows(self, call: ModuleCall, cached: CachedCall | None = None) -> Answer:
        """Computes a call of whole images, with compiled blocks if requested."""
        if self._compiler is not None and call.eager and cached is None:
            self.noted.add(notes.EAGER)
        elif self._compiler is not None or cached is not None:
            with self._blocks.unsplit_call(cached):
                return self._compute(call)
        return self._compute(call)

    def _compute_bands(self, call: ModuleCall) -> Answer:
        """Splits rows over the sequence axis if they divide evenly, otherwise images into bands, or attention."""
        sequence = self.layout.sequence
        if len(set(split_rows(call, sequence.size, self._rows_are_inseparable(call)))) == 1:
            return self._by_rows(call, (sequence,), self._compute_rows)
        try:
            self._bands = self._bands or UNetBands(self.model, self.layout)
            reason = self._bands.refusal(call)
        except RequestError as error:
            reason = f"this UNet has {error}, which bands of rows do not know"
        if self._bands is None or reason:
            return self._compute_queries(call, reason)
        self.noted.add(notes.BANDS.format(ranks=sequence.size))
        return self._bands(call)

    def _compute_queries(self, call: ModuleCall, why: str, cached: CachedCall | None = None) -> Answer:
        """Splits rows over the sequence axis if there are enough, otherwise queries or heads of attention."""
        sequence = self.layout.sequence
        if call.rows // max(call.unit, 1) >= sequence.size and not self._rows_are_inseparable(call):
            return self._by_rows(call, (sequence,), partial(self._compute_rows, cached=cached))
        if call.by_heads or (call.kwargs.get("transformer_options") or {}).get(OVERRIDE) is not None:
            self.noted.add(notes.JOINT_HEADS if call.joint_heads else notes.HEADS)
            if call.joint_heads:
                return self._compute_rows(call, cached)
            with attention_by(queries.HeadAttention(self.layout, call.head_trial)):
                return self._compute_rows(call, cached)
        self.noted.add(notes.QUERIES.format(why=why, keys=queries.MIN_KEYS))
        with attention_by(partial(queries.split_queries, self.layout)):
            return self._compute_rows(call, cached)

    def _compute_shared_out(self, blocks: BlockCalls, cached: CachedCall | None, call: ModuleCall) -> Answer:
        self._note_rounding()
        control = call.kwargs.get("control")
        if isinstance(control, dict):
            control = {name: list(residuals) for name, residuals in control.items()}
            call = replace(call, kwargs=call.kwargs | {"control": control})
        # With paired projections another pack's code would see tokens of two ranks with half of the heads each.
        plain = not call.eager and self._compiler is None and self.xfuser is None
        blocks.sends_tokens = self._sends_tokens and call.tokens == STAY and plain
        blocks.careful = call.careful
        with blocks.shared_out(stay=call.tokens == STAY, control=control, cached=cached):
            return self._compute(call)

    def _note_rounding(self) -> None:
        if self._exchange_dtype != SAME and self.xfuser is None:
            self.rounds = True
            name, over_a_ring = type(self.model.module).__name__, self.layout.ring.size > 1
            self.noted.add(notes.ROUNDED.format(drift=drift_in_words(name, over_a_ring=over_a_ring)))


def _gathered(answer: Answer, rows: int, shares: tuple[int, ...], axis: Axis) -> Answer:
    """Returns the answers of all ranks, joined in the order of their rows."""
    if isinstance(answer, (list, tuple)):
        return type(answer)(_gathered(item, rows, shares, axis) for item in answer)
    if not isinstance(answer, Tensor):
        return answer
    if not answer.ndim or len(answer) != rows:
        raise RequestError(
            f"The model answered {rows} rows with a tensor of {tuple(answer.shape)}, which cannot be put together. Set "
            f"cfg_degree and data_degree to 1."
        )
    return all_gather(answer[: shares[axis.index]], shares, axis)
