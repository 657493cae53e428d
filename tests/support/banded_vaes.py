"""Shared by tests of ComfyUI's VAEs in bands of rows: ranks with broken exchanges, and refusals of networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from differences import relative_difference
from parallel_backend.engine.bands.row_bands import BandGroupNorm, Bands
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.errors import PlatformError

TOLERANCE = 1e-5  # relative to the largest value
Half = Callable[[str, Layouts], BandedNetwork]  # makes the half of the network with this name


def go_without(what: str) -> None:
    """Breaks the exchange between bands on this rank from now on: "rows", "ways", "keys" or "moments"."""
    start = Bands.start_halo
    if what == "rows":  # zeros in their place, as in a split without exchange
        Bands.start_halo = lambda self, x, **ways: partial(_zeros, start(self, x, **ways))
    elif what == "ways":  # swaps above and below: a band gets the row from the wrong side
        Bands.start_halo = lambda self, x, above=True, below=True: start(self, x, above=below, below=above)
    elif what == "keys":
        Bands.gather = lambda self, mine: mine
    else:
        BandGroupNorm.forward = torch.nn.GroupNorm.forward


def _zeros(wait: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(None if row is None else torch.zeros_like(row) for row in wait())


def refusals(world: World, half: Half, names: list[str], broken: str = "") -> list[str]:
    """Returns for each network this rank's refusal message, or an empty string if it accepts the network."""
    if broken:
        go_without(broken)
    words, layouts = dict.fromkeys(names, ""), Layouts(world)
    for name in names:
        try:
            half(name, layouts).check()
        except PlatformError as refusal:
            words[name] = str(refusal)
    return list(words.values())


def in_frames(output: Tensor) -> Tensor:
    """Converts a whole network's output [C, (t,) h, w] to [t, h, w, C]."""
    return (output if output.ndim == 4 else output[:, None]).permute(1, 2, 3, 0)


def difference(output: Tensor, expected: Tensor) -> float:
    """Returns relative_difference, and asserts that the shapes are equal."""
    assert output.shape == expected.shape
    return relative_difference(output, expected)
