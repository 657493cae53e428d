"""The blocks of a module as its table describes them, and the places of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ...models.tokens.regions import Argument, Blocks, Guided, Region, Tokens


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

    def image_tokens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Returns the number of the image's tokens in a call."""
        name, tokens = self.image
        given = self.argument(name, args, kwargs)
        value: Tensor = given if tokens.item is None else given[tokens.item]
        return value.shape[tokens.dim :][: tokens.over].numel()

    def handed_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the block's output if it changed nothing: its inputs."""
        found = [self.argument(name, args, kwargs) for name in self.kind.gives if name is not None]
        # A block whose output is one tuple of several values also takes them as one argument.
        return tuple(found) if len(found) > 1 else found[0]

    def carried(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Returns the arguments that the previous block gave, each once; of a tuple (video, sound) its items."""
        found: list[Tensor] = []
        for name in self._carried_names():
            value = self.argument(name, args, kwargs)
            found += [value] if isinstance(value, Tensor) else value
        return found

    def with_carried(
        self, values: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with `values` in place of those that `carried` returns."""
        rest, replaced = iter(values), {}
        for name in self._carried_names():
            old = self.argument(name, args, kwargs)
            replaced[name] = next(rest) if isinstance(old, Tensor) else type(old)(next(rest) for _ in old)
        return self.with_arguments(replaced, args, kwargs)

    def _carried_names(self) -> list[str | int]:
        return list(dict.fromkeys(name for name in self.kind.gives if name is not None))

    def without_guides(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Returns (args, kwargs, guides). Removes the argument that a Guided of the block's attention names: the block
        would apply its token numbers to a share. `guides`: the removed value, None for a tensor (which stays) or none.
        """
        for attends in self.kind.attends:
            if isinstance(attends, Guided):
                found = self.argument(attends.argument, args, kwargs)
                if found is not None and not isinstance(found, Tensor):
                    return *self.with_arguments({attends.argument: None}, args, kwargs), found
        return args, kwargs, None

    def argument(self, name: str | int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value of an argument in a call, or None if it is left out."""
        if name in kwargs:
            return kwargs[str(name)]
        place = self.place(name)
        return args[place] if place is not None and place < len(args) else None

    def with_arguments(
        self, values: Mapping[str | int, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call's arguments with these values, by name. An argument that the call leaves out stays so."""
        listed, named = list(args), dict(kwargs)
        for name, value in values.items():
            place = self.place(name)
            if name in named:
                named[str(name)] = value
            elif place is not None and place < len(listed):
                listed[place] = value
        return tuple(listed), named


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
