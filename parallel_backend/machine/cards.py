"""A table of GPU models, from the makers' data sheets.

Peak rates are dense bf16 tensor throughput with fp32 accumulation, without sparsity. Memory is in GB of 1e9 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import RequestError


@dataclass(frozen=True)
class Card:
    """One GPU model. `tflops`: dense bf16; `memory`: GB; `bandwidth`: of the memory, GB/s."""

    name: str
    tflops: float
    memory: float
    bandwidth: float


# Sources: NVIDIA data sheets and architecture white papers (Ampere, Ada, Hopper, Blackwell), AMD's MI300X data sheet.
_CARDS = (
    Card("b200", 2250, 180, 8000),
    Card("h200", 989, 141, 4800),
    Card("h100", 989, 80, 3350),
    Card("h100-pcie", 756, 80, 2000),
    Card("h800", 989, 80, 3350),
    Card("h20", 148, 96, 4000),
    Card("a100", 312, 80, 2039),
    Card("a100-40gb", 312, 40, 1555),
    Card("a800", 312, 80, 2039),
    Card("a40", 149.7, 48, 696),
    Card("a10", 125, 24, 600),
    Card("a6000", 154.8, 48, 768),
    Card("v100", 125, 32, 900),
    Card("t4", 65, 16, 320),
    Card("l40s", 362, 48, 864),
    Card("l40", 181, 48, 864),
    Card("l20", 119.5, 48, 864),
    Card("l4", 121, 24, 300),
    Card("rtx6000ada", 364, 48, 960),
    Card("rtx2000ada", 48, 16, 224),
    Card("rtxpro6000", 503, 96, 1792),
    Card("rtx5090", 209.5, 32, 1792),
    Card("rtx5080", 112.6, 16, 960),
    Card("rtx4090", 165.2, 24, 1008),
    Card("rtx4090d", 147, 24, 1008),
    Card("rtx4080", 97.5, 16, 717),
    Card("rtx3090", 71, 24, 936),
    Card("mi300x", 1307, 192, 5300),
)
CARDS = {card.name: card for card in _CARDS}
# Words that the driver or a person puts before or after the card's own name.
_MAKERS = {"nvidia", "amd", "geforce", "quadro", "tesla", "instinct"}
# Cards that are sold in two variants under one name: (the name, a word that marks the other variant) -> that variant.
_KINDS = {("h100", "pcie"): "h100-pcie", ("a100", "40gb"): "a100-40gb"}
_OTHER_CARDS = {"laptop", "mobile", "maxq"}


def find_card(name: str) -> Card:
    """Returns the card with this name, as users or drivers write it. Raises RequestError with the known names."""
    words = [w for w in re.split(r"[^a-z0-9.]+", name.lower()) if w and w not in _MAKERS]
    spelt = {re.sub(r"[^a-z0-9]", "", key): key for key in CARDS}
    spelt |= {key.removeprefix("rtx"): spelt[key] for key in list(spelt)}
    # The driver adds form factor and memory: "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe".
    for count in range(len(words), 0, -1):
        joined = "".join(words[:count])
        found = spelt.get(joined) or spelt.get(joined.removeprefix("rtx"))
        if found and not _OTHER_CARDS & set(words):
            other = next((_KINDS[found, w] for w in words[count:] if (found, w) in _KINDS), found)
            return CARDS[other]
    raise RequestError(f"card {name!r} is unknown; known are {', '.join(sorted(CARDS))}.")
