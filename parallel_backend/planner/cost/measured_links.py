"""Puts a calibration's links in place of the data sheet's: the cost model's constants as measured. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import median

from ...strategy import ParallelStrategy
from ...wire.calibration import ALL_TO_ALL, POINT_TO_POINT, Calibration, slowest_rate
from ..machine.cards import Interconnect
from .communication import unit_load
from .model import DEFAULT, Constants

# A share of a nominal rate: below, something else than the link was measured; above, NVML knew too low a rate.
_LEAST, _MOST = 1e-4, 2.0


def measured_constants(
    ranks: Sequence[Calibration], link: Interconnect, constants: Constants = DEFAULT
) -> Constants:
    """`constants` with what `ranks` measured: the share of `link`'s rates that is reached, and a collective's latency.

    The link keeps its levels: both shares, within and across sockets, are scaled by how far the all-to-all (else the
    ring) over the calibrated groups was off.
    """
    strategy, world = ranks[0].strategy, len(ranks)
    if world == 1:
        return constants
    inside = f"reached_{link.kind if link.kind != 'network' else 'outside'}"
    known = {f.name: getattr(constants, f.name) for f in fields(constants)}
    for kind, axis in ((ALL_TO_ALL, "ulysses"), (POINT_TO_POINT, "ring")):
        rate = slowest_rate(tuple(ranks), kind)
        if rate is None:
            continue
        # Where the strategy has no such axis, all ranks were measured together.
        over = (
            strategy
            if getattr(strategy, f"{axis}_degree") > 1
            else ParallelStrategy(**{f"{axis}_degree": world})
        )
        predicted = link.seconds(unit_load(link, over, axis), known[inside], constants.reached_outside)
        factor = predicted * rate  # seconds predicted for one byte, over those measured
        changed = {
            name: min(max(known[name] * factor, _LEAST), _MOST) for name in {inside, "reached_outside"}
        }
        return constants.replace(**changed, call_s=median(c.collective_s for c in ranks))
    return constants.replace(call_s=median(c.collective_s for c in ranks))
