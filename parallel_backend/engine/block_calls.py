"""Blocks of a module on one rank's tokens: inside a call their forwards get shares and meet at attention.

Nothing of a model's own forward is known here. What lies between blocks sees whole tokens where each block gathers what
it gives, and shares where tokens stay apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import RequestError
from ..models.base import ModuleModel
from ..models.comfyui.regions import LAST_BLOCK, Argument, Blocks, Region, Tokens
from .attention.uneven import UnevenAttention
from .block_tokens import BlockTokens
from .groups import Layout
from .traffic_counter import Traffic

# Runs a block's own forward.
RunBlock = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def as_it_is(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)


@dataclass(frozen=True)
class _Block:
    """A block of a region. `names`: of its forward's arguments; `is_last`: of the region."""

    module: nn.Module
    kind: Blocks
    names: tuple[str, ...]
    is_last: bool


class BlockCalls:
    """The blocks of `model` over the sequence axis of `layout`. Raises RequestError where this version of the module is
    not the one that its table describes. `run_block`: for those in which ranks meet at attention only."""

    def __init__(
        self, model: ModuleModel, layout: Layout, traffic: Traffic, run_block: RunBlock = as_it_is
    ) -> None:
        self._model = model
        self._run_block = run_block
        self._layout = layout
        self._traffic = traffic
        self._regions = [(region, _blocks_of(model.module, region)) for region in model.regions]

    @contextmanager
    def shared_out(self, *, stay: bool, control: dict[str, Any] | None) -> Iterator[None]:
        """Inside, calls of the module share out tokens. `stay`: they stay apart from the first block of a region to the
        last; `control`: a ControlNet's residuals, in lists that the module got, to be cut in place."""
        with ExitStack() as restore:
            for region, blocks in self._regions:
                region_stays = stay and region.leave is not None
                passing = _Pass(self, region, region_stays, control)
                for block in blocks:
                    block.module.forward = passing.forward_of(block)
                    restore.callback(block.module.__dict__.pop, "forward")
                if region_stays and region.leave not in (None, LAST_BLOCK):
                    leave = self._model.module.get_submodule(str(region.leave))
                    restore.callback(leave.register_forward_pre_hook(passing.leave).remove)
            yield

    def tokens(self) -> BlockTokens:
        return BlockTokens(self._layout.sequence, self._layout.sequence_shares, self._traffic)

    def run(self, block: _Block, tokens: BlockTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's own forward, with what it calls as attention going over all ranks."""
        attention = UnevenAttention(self._layout, tokens, block.kind.attends, block.module)
        with ExitStack() as inside:
            inside.enter_context(self._model.attention_by(attention))
            for path, argument in block.kind.whole.items():
                module = block.module.get_submodule(path)
                gather, cut = _around_whole(tokens, argument)
                inside.callback(module.register_forward_pre_hook(gather).remove)
                inside.callback(module.register_forward_hook(cut).remove)
            run = as_it_is if block.kind.whole else self._run_block
            return run(block.module, args, kwargs)


class _Pass:
    """One pass through a region's blocks, in a call of the module."""

    def __init__(
        self, calls: BlockCalls, region: Region, stays: bool, control: dict[str, Any] | None
    ) -> None:
        self._calls = calls
        self._region = region
        self._stays = stays
        self._control = control if stays else None
        self._tokens: BlockTokens | None = None  # whose shares are on their way from block to block

    def forward_of(self, block: _Block) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = self._tokens or self._calls.tokens()
            out = self._calls.run(block, tokens, *_cut(block, tokens, args, kwargs))
            if self._stays:
                self._tokens = tokens
                self._cut_control(block, tokens)
                if not block.is_last or self._region.leave != LAST_BLOCK:
                    return out
            self._tokens = None
            outs = out if isinstance(out, tuple) else (out,)
            arguments = block.kind.arguments
            whole = tuple(
                item if item is None or name is None else tokens.gather(item, _tokens(arguments[name]))
                for item, name in zip(outs, block.kind.gives, strict=True)
            )
            return whole if isinstance(out, tuple) else whole[0]

        return forward

    def leave(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the module that needs whole tokens again."""
        if self._tokens is None:  # no block of the region ran
            return args
        tokens, self._tokens = self._tokens, None
        return (tokens.gather(args[0], _tokens(self._region.leaves)), *args[1:])

    def _cut_control(self, block: _Block, tokens: BlockTokens) -> None:
        if self._control is not None:
            tokens.cut_residuals(self._control, _main_stream(block.kind))
            self._control = None


def _around_whole(tokens: BlockTokens, argument: Tokens) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that gather the first argument of a module, and cut what it gives."""

    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (tokens.gather(args[0], argument), *args[1:])

    def cut(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return tokens.cut(out, argument, carried=True)

    return gather, cut


def _blocks_of(module: nn.Module, region: Region) -> list[_Block]:
    found: list[tuple[nn.Module, Blocks]] = []
    for path, kind in region.lists.items():
        try:
            found += [(block, kind) for block in module.get_submodule(path)]  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            raise _other_version(module, f"it has no list of blocks {path}") from None
    blocks = []
    for number, (block, kind) in enumerate(found):
        parameters = inspect.signature(type(block).forward).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
        missing = {name for name in kind.gives if isinstance(name, str)} - set(names)
        if missing:
            raise _other_version(module, f"{type(block).__name__} does not take {', '.join(sorted(missing))}")
        blocks.append(_Block(block, kind, names, number == len(found) - 1))
    return blocks


def _other_version(module: nn.Module, reason: str) -> RequestError:
    return RequestError(
        f"The tokens of {type(module).__name__} cannot be shared out in this version of ComfyUI: {reason}. Set "
        f"ulysses_degree and ring_degree to 1 (cfg_degree and data_degree need no knowledge of blocks)."
    )


def _cut(
    block: _Block, tokens: BlockTokens, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with this rank's tokens."""
    listed, named = list(args), dict(kwargs)
    for name, argument in block.kind.arguments.items():
        carried = name in block.kind.gives
        if name in named:
            named[str(name)] = tokens.cut(named[str(name)], argument, carried)
            continue
        place = name if isinstance(name, int) else _place(block.names, name)
        if place is not None and place < len(listed):
            listed[place] = tokens.cut(listed[place], argument, carried)
    return tuple(listed), named


def _place(names: tuple[str, ...], name: str) -> int | None:
    return names.index(name) if name in names else None


def _tokens(leaves: str | Argument | None) -> Tokens:
    argument = Tokens(leaves) if isinstance(leaves, str) else leaves
    assert isinstance(argument, Tokens), f"the table of blocks gathers {argument}"
    return argument


def _main_stream(kind: Blocks) -> str:
    """The image's, to whose tokens a ControlNet adds."""
    streams = [argument.stream for argument in kind.arguments.values() if isinstance(argument, Tokens)]
    return "img" if "img" in streams else streams[0]
