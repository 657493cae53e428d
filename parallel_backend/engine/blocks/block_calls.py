"""Calls of a module's blocks on one rank's tokens: the blocks' forwards get shares, and ranks exchange at attention.

This code knows nothing of a model's own forward. If each block gathers its outputs, the code between blocks gets all
tokens; if tokens stay apart, it gets this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ...models.attention import attention_by
from ...models.base import ModuleModel
from ...models.tokens.cached_outputs import CachedOutput, cached_outputs, main_region
from ...models.tokens.regions import LAST_BLOCK, Blocks, Region, Tokens
from ..attention.guides import Guides
from ..attention.projections import paired_projections
from ..attention.sequence import SequenceAttention, StaleKeys
from ..comm.groups import Layout
from ..tokens.block_tokens import BlockTokens
from ..tokens.region_blocks import BlockInputs, blocks_of, main_stream, tokens_of
from .step_cache import CachedCall

# Runs a block's own forward.
RunBlock = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def run_unmodified(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)


class AttentionBypassed(Exception):
    """The error for a block that did not call the given attention, so that it saw only this rank's tokens."""


@dataclass(eq=False)
class BlockCalls:
    """The blocks of `_model` over the sequence axis of `_layout`. Raises RequestError if the table does not describe
    this version of the module. `_run_block`: runs blocks in which ranks exchange at attention only; `_make_attention`:
    SequenceAttention, or a function with the same arguments that returns a subclass; `sends_tokens`: True if two ranks
    may exchange tokens before their projection, since only the module's own code then reads values inside blocks;
    `careful`: True if a node's code takes part, which may replace a block's attention or leave some of it out."""

    _model: ModuleModel
    _layout: Layout
    _run_block: RunBlock
    _make_attention: Callable[..., SequenceAttention]
    sends_tokens: bool = False
    careful: bool = False

    def __post_init__(self) -> None:
        module = self._model.module
        self._regions = [(region, blocks_of(module, region)) for region in self._model.regions]

    @contextmanager
    def shared_out(
        self, *, stay: bool, control: dict[str, Any] | None, cached: CachedCall | None = None
    ) -> Iterator[None]:
        """Makes calls of the module share out tokens inside the context. `stay`: tokens stay apart from the first block
        of a region to the last; `control`: a ControlNet's residuals, in the lists that the module gets, to be cut in
        place; `cached`: decides which blocks run."""
        with ExitStack() as restore:
            for region, blocks in self._regions:
                region_stays = stay and region.leave is not None
                passing = _Pass(self, region, region_stays, control, self._cached(cached, region))
                for block in blocks:
                    block.answer_by(passing.answer, restore)
                if region_stays and region.leave not in (None, LAST_BLOCK):
                    leave = self._model.module.get_submodule(str(region.leave))
                    restore.callback(leave.register_forward_pre_hook(passing.leave).remove)
            self._replace_what_leaves(cached, restore)
            yield

    @contextmanager
    def unsplit_call(self, cached: CachedCall | None) -> Iterator[None]:
        """Makes a call of the module with all tokens run its blocks by `_run_block` inside the context, only those that
        `cached` requests."""
        with ExitStack() as restore:
            for region, blocks in self._regions:
                in_region = self._cached(cached, region)
                answer = self.run_unshared if in_region is None else partial(in_region.run, self.run_unshared)
                for block in blocks:
                    block.answer_by(answer, restore)
            self._replace_what_leaves(cached, restore)
            yield

    def cached_outputs(self) -> tuple[CachedOutput, ...]:
        """Returns the outputs of this module's blocks that a step cache keeps; empty if it cannot keep any."""
        region, blocks = self._regions[-1]
        if main_region(self._model.regions) is None or len(blocks) < 2:
            return ()
        return cached_outputs(region, blocks[0].kind, blocks[-1].kind)

    def _cached(self, cached: CachedCall | None, region: Region) -> CachedCall | None:
        return cached if region is main_region(self._model.regions) else None

    def _replace_what_leaves(self, cached: CachedCall | None, restore: ExitStack) -> None:
        """Hooks `cached` in front of the module after the blocks, before the hook that gathers tokens."""
        region, _ = self._regions[-1]
        if cached is not None and region.leave != LAST_BLOCK:
            leave = self._model.module.get_submodule(str(region.leave))
            restore.callback(leave.register_forward_pre_hook(cached.take_leave, prepend=True).remove)

    def tokens(self) -> BlockTokens:
        return BlockTokens(self._layout.sequence, self._layout.sequence_shares)

    def run(self, tokens: BlockTokens, inputs: BlockInputs, stale_keys: StaleKeys | None = None) -> Any:
        """Runs the block's own forward with attention over all ranks. `stale_keys`: for a PipeFusion stage. Raises
        AttentionBypassed if the block did not call that attention."""
        block = inputs.block
        if self.careful and self._model.attention_is_replaced():  # on all ranks, before any exchange
            raise AttentionBypassed(f"{type(block.module).__name__} attends by a node's function")
        inputs, guides = inputs.without_guides()
        attention = self._make_attention(
            self._layout, tokens, block.kind.attends, block.module, Guides.of(guides), stale_keys=stale_keys
        )
        with ExitStack() as inside:
            inside.enter_context(attention_by(attention))
            if self.sends_tokens:
                pair = paired_projections(inputs, self._model, attention)
                if pair is not None:
                    attention.arrive_projected = pair.arrive
                    inside.enter_context(pair.installed())
            for path, argument in block.kind.whole.items():
                _compute_whole(block.module.get_submodule(path), tokens, argument, inside)
            run = run_unmodified if block.kind.whole else self._run_block
            out = run(block.module, inputs.args, inputs.kwargs)
            left_out = self.careful and _leaves_out(block.kind, attention.calls)
            if left_out or (block.kind.attends and not attention.calls):
                raise AttentionBypassed(f"{type(block.module).__name__} attended by itself")
            return out

    def run_unshared(self, inputs: BlockInputs) -> Any:
        """Runs the block's own forward on all tokens."""
        return self._run_block(inputs.block.module, inputs.args, inputs.kwargs)


@dataclass(eq=False)
class _Pass:
    """One pass through a region's blocks in one call of the module. `_tokens`: the shares that blocks pass on now."""

    _calls: BlockCalls
    _region: Region
    _stays: bool
    _control: dict[str, Any] | None
    _cached: CachedCall | None
    _tokens: BlockTokens | None = None

    def answer(self, inputs: BlockInputs) -> Any:
        """Answers a call of a block: with its share, or with whole tensors if they leave the blocks."""
        if self._cached is None or self._stays:
            return self._run(inputs)
        return self._cached.run(self._run, inputs)  # a block that does not run has nothing to gather

    def _run(self, inputs: BlockInputs) -> Any:
        tokens, kind = self._tokens or self._calls.tokens(), inputs.block.kind
        inputs = inputs.cut(tokens)
        compute = partial(self._calls.run, tokens)
        cached = self._cached if self._stays else None
        out = compute(inputs) if cached is None else cached.run(compute, inputs, tokens)
        if self._stays:
            self._tokens = tokens
            if self._control is not None:
                tokens.cut_residuals(self._control, main_stream(kind))
                self._control = None
            if not inputs.block.is_last or self._region.leave != LAST_BLOCK:
                return out
        self._tokens = None
        outs = out if isinstance(out, tuple) else (out,)
        whole = tuple(
            item if item is None or name is None else tokens.gather(item, tokens_of(kind.arguments[name]))
            for item, name in zip(outs, kind.gives, strict=True)
        )
        return whole if isinstance(out, tuple) else whole[0]

    def leave(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gathers the tokens for the module that needs all of them again; a forward pre-hook."""
        if self._tokens is None:  # no block of the region ran
            return args
        tokens, self._tokens = self._tokens, None
        return (tokens.gather(args[0], tokens_of(self._region.leaves)), *args[1:])


def _leaves_out(kind: Blocks, calls: int) -> bool:
    """Returns True if a block made fewer `calls` of attention than the table lists, so that later ones were taken for
    earlier ones of other streams."""
    return calls < len(kind.attends) and None in kind.attends and kind.attends[-1] is not None


def _compute_whole(module: nn.Module, tokens: BlockTokens, argument: Tokens, inside: ExitStack) -> None:
    """Hooks a module: its first argument is gathered, and its output cut."""
    gather = module.register_forward_pre_hook(lambda _, args: (tokens.gather(args[0], argument), *args[1:]))
    cut = module.register_forward_hook(lambda _, args, out: tokens.cut(out, argument, carried=True))
    inside.callback(gather.remove)
    inside.callback(cut.remove)
