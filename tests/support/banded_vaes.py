"""What tests of ComfyUI's VAEs in bands of rows share: halves of them on one rank, and ranks that go without others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from differences import relative_difference
from parallel_backend.engine.bands.row_bands import Bands
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.errors import PlatformError

TOLERANCE = 1e-5  # of the largest value
Half = Callable[[str, Layouts], BandedNetwork]  # of the network with this name
Start = Callable[..., Callable[[], tuple[Tensor | None, ...]]]


def without_rows(start: Start) -> Start:
    """Bands.start_halo of ranks that take their neighbours' rows for zeros, as a split without exchange would."""

    def started(self: Bands, x: Tensor, **ways: bool) -> Callable[[], tuple[Tensor | None, ...]]:
        wait = start(self, x, **ways)
        return lambda: tuple(None if row is None else torch.zeros_like(row) for row in wait())

    return started


def go_without(what: str) -> None:
    """Whatever this rank computes from now on, it does without what the others hold."""
    start = Bands.start_halo
    if what == "rows":
        Bands.start_halo = without_rows(start)
    elif what == "ways":  # a halved band looks above itself in place of below, and the other way round
        Bands.start_halo = lambda self, x, above=True, below=True: start(self, x, above=below, below=above)
    else:
        Bands.gather = lambda self, mine: mine


def compute(
    world: World, half: Half, inputs: dict[str, Tensor], shares: tuple[float, ...] = (), broken: str = ""
) -> dict[str, tuple[Tensor, int, int]]:
    """Per name (its output [t, h, w, C] or an empty tensor, steps announced, bytes sent) of one rank."""
    if broken:
        go_without(broken)
    layouts, found = Layouts(world), {}
    for name, given in inputs.items():
        network, steps, before = half(name, layouts), [], layouts.traffic.bytes_sent
        output = network(given, shares, lambda steps=steps: steps.append(1))
        sent = layouts.traffic.bytes_sent - before
        found[name] = torch.empty(0) if output is None else output, len(steps), sent
    return found


def refusals(world: World, half: Half, names: list[str], broken: str = "") -> list[str]:
    """The words in which this rank refuses each network, if it does."""
    if broken:
        go_without(broken)
    words, layouts = [], Layouts(world)
    for name in names:
        try:
            half(name, layouts).check()
        except PlatformError as refusal:
            words.append(str(refusal))
        else:
            words.append("")
    return words


def in_frames(output: Tensor) -> Tensor:
    """[C, (t,) h, w] of a whole network -> [t, h, w, C]."""
    return (output if output.ndim == 4 else output[:, None]).permute(1, 2, 3, 0)


def difference(output: Tensor, expected: Tensor) -> float:
    """As relative_difference, of the same shape."""
    assert output.shape == expected.shape
    return relative_difference(output, expected)
