"""A model call of Flux in two parts, the first block and all others, with room for a decision between them.

diffusers' own forward runs both times, over only some of the blocks. So blocks are called as the modules they are,
compiled or sharded, and nothing depends on data inside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from ..block_list import Block
from .module import FluxModel

FIRST = range(1)


@dataclass
class FirstBlockOutput:
    """What left the first block: text [r, t, hidden] and image [r, n, hidden]. `change`: what it added to the image."""

    text: Tensor
    image: Tensor
    change: Tensor


def first_block(model: FluxModel, inputs: dict[str, object]) -> FirstBlockOutput:
    """The first block's part of a model call. `inputs`: the arguments of FluxModel.velocity, without residuals."""
    block, begun = model.transformer.transformer_blocks[0], []

    def noted(*, hidden_states: Tensor, encoder_hidden_states: Tensor, **others: object):
        text, image = block(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, **others
        )
        begun.append(FirstBlockOutput(text, image, image - hidden_states))
        return text, image

    with _only(model, FIRST, [noted], []):
        model.velocity(**inputs)  # of which only `begun` is wanted; the last layer is a thousandth of a call
    return begun.pop()


def other_blocks(
    model: FluxModel, begun: FirstBlockOutput, inputs: dict[str, object]
) -> tuple[Tensor, Tensor]:
    """All that follows the first block: (the model's output, what the blocks added to the image [r, n, hidden])."""
    transformer = model.transformer
    doubles = [_given(begun.text, begun.image), *list(transformer.transformer_blocks)[1:]]
    singles = [*transformer.single_transformer_blocks]
    last, added = singles or doubles, []
    block = last[-1]

    def noted(**arguments: object):
        text, image = block(**arguments)
        added.append(image - begun.image)
        return text, image

    last[-1] = noted
    with _only(model, range(1, model.blocks[0].stop), doubles, singles):
        output = model.velocity(**inputs)
    return output, added.pop()


def last_layer(model: FluxModel, begun: FirstBlockOutput, added: Tensor, inputs: dict[str, object]) -> Tensor:
    """The model's output if the other blocks added `added` to the image. Nobody reads the text any more."""
    with _only(model, range(0), [_given(begun.text, begun.image + added)], []):
        return model.velocity(**inputs)


def _given(text: Tensor, image: Tensor) -> Block:
    """A block that gives what is known already."""
    return lambda **arguments: (text, image)


@contextmanager
def _only(model: FluxModel, blocks: range, doubles: list[Block], singles: list[Block]) -> Iterator[None]:
    """Has calls pass through these alone. `blocks`: which of the model's own are among them."""
    transformer = model.transformer
    first, second = transformer.transformer_blocks, transformer.single_transformer_blocks
    with nullcontext() if model.gathers is None else model.gathers.only(blocks):
        first.route, second.route = doubles, singles
        try:
            yield
        finally:
            first.route = second.route = None
