"""The blocks of a module as its table describes them, and the arguments of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ...models.tokens.regions import Argument, Blocks, Guided, Region, Tokens
from .block_tokens import BlockTokens


@dataclass(frozen=True)
class Block:
    """A block of a region. `names`: its forward's arguments; `is_first`, `is_last`: True for the region's ends."""

    module: nn.Module
    kind: Blocks
    names: tuple[str, ...]
    is_first: bool
    is_last: bool

    def place(self, name: str | int) -> int | None:
        """Returns the position of an argument in `args`; None if the forward has no such argument."""
        if isinstance(name, int):
            return name
        return self.names.index(name) if name in self.names else None

    @property
    def image(self) -> tuple[str | int, Tokens]:
        """(the argument that has the image's tokens, their place in it)."""
        stream, arguments = main_stream(self.kind), self.kind.arguments
        given = ((name, arguments.get(name)) for name in self.kind.gives if name is not None)
        return next((name, one) for name, one in given if isinstance(one, Tokens) and one.stream == stream)

    def answer_by(self, answer: Callable[[BlockInputs], Any], restore: ExitStack) -> None:
        """Makes `answer` replace the block's forward until `restore` closes."""
        self.module.forward = lambda *args, **kwargs: answer(BlockInputs(self, args, kwargs))
        restore.callback(self.module.__dict__.pop, "forward")


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """The arguments of one call of a block."""

    block: Block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, name: str | int) -> Any:
        """Returns the value of an argument, or None if the call leaves it out."""
        if name in self.kwargs:
            return self.kwargs[str(name)]
        place = self.block.place(name)
        return self.args[place] if place is not None and place < len(self.args) else None

    def replaced(self, values: Mapping[str | int, Any]) -> BlockInputs:
        """Returns the arguments with these values, by name. An argument that the call leaves out stays so."""
        listed, named = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            place = self.block.place(name)
            if name in named:
                named[str(name)] = value
            elif place is not None and place < len(listed):
                listed[place] = value
        return BlockInputs(self.block, tuple(listed), named)

    def cut(self, tokens: BlockTokens) -> BlockInputs:
        """Returns the arguments with this rank's tokens only."""
        kind = self.block.kind
        return self.replaced(
            {
                name: tokens.cut(self.get(name), argument, name in kind.gives)
                for name, argument in kind.arguments.items()
            }
        )

    def image_tokens(self) -> int:
        """Returns the number of the image's tokens."""
        name, tokens = self.block.image
        given = self.get(name)
        value: Tensor = given if tokens.item is None else given[tokens.item]
        return value.shape[tokens.dim :][: tokens.over].numel()

    def handed_on(self) -> Any:
        """Returns the block's output if it changed nothing: its inputs."""
        found = [self.get(name) for name in self.block.kind.gives if name is not None]
        # A block whose output is one tuple of several values also takes them as one argument.
        return tuple(found) if len(found) > 1 else found[0]

    def carried(self) -> list[Tensor]:
        """Returns the arguments that the previous block gave, each once; of a tuple (video, sound) its items."""
        found: list[Tensor] = []
        for name in self._carried_names():
            value = self.get(name)
            found += [value] if isinstance(value, Tensor) else value
        return found

    def with_carried(self, values: Sequence[Tensor]) -> BlockInputs:
        """Returns the arguments with `values` in place of those that `carried` returns."""
        rest, replaced = iter(values), {}
        for name in self._carried_names():
            old = self.get(name)
            replaced[name] = next(rest) if isinstance(old, Tensor) else type(old)(next(rest) for _ in old)
        return self.replaced(replaced)

    def _carried_names(self) -> list[str | int]:
        return list(dict.fromkeys(name for name in self.block.kind.gives if name is not None))

    def without_guides(self) -> tuple[BlockInputs, Any]:
        """Returns (arguments, guides). Removes the argument that a Guided of the block's attention names: the block
        would apply its token numbers to a share. `guides`: the removed value, None for a tensor (which stays) or none.
        """
        for attends in self.block.kind.attends:
            if isinstance(attends, Guided):
                found = self.get(attends.argument)
                if found is not None and not isinstance(found, Tensor):
                    return self.replaced({attends.argument: None}), found
        return self, None


def blocks_of(module: nn.Module, region: Region) -> list[Block]:
    """Returns a region's blocks in the table's order. Raises RequestError if this version of the module differs."""
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
        blocks.append(Block(block, kind, names, number == 0, number == len(found) - 1))
    return blocks


def are_known(module: nn.Module, regions: Sequence[Region]) -> bool:
    """Returns True if the table has regions of a module, and this version of it has their blocks."""
    try:
        return bool([blocks_of(module, region) for region in regions])
    except RequestError:
        return False


def _other_version(module: nn.Module, reason: str) -> RequestError:
    return RequestError(
        f"The tokens of {type(module).__name__} cannot be shared out in this version of ComfyUI: {reason}. Set "
        f"ulysses_degree and ring_degree to 1 (cfg_degree and data_degree need no knowledge of blocks)."
    )


def tokens_of(leaves: str | Argument | None) -> Tokens:
    argument = Tokens(leaves) if isinstance(leaves, str) else leaves
    assert isinstance(argument, Tokens), f"the table of blocks gathers {argument}"
    return argument


def main_stream(kind: Blocks) -> str:
    """Returns the image's stream, to whose tokens a ControlNet adds."""
    streams = [argument.stream for argument in kind.arguments.values() if isinstance(argument, Tokens)]
    return "img" if "img" in streams else streams[0]
