"""Cards and links as data, from the makers' data sheets.

Peak rates are dense bf16 tensor throughput with fp32 accumulation, without sparsity; memory in GB of 1e9 bytes; link
rates are nominal, one direction, per card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import RequestError


@dataclass(frozen=True)
class Card:
    """One GPU model. `tflops`: dense bf16; `memory`: GB; `bandwidth` of it, `nvlink`, `pcie`: GB/s one way."""

    name: str
    tflops: float
    memory: float
    bandwidth: float
    pcie: float = 32.0
    nvlink: float = 0.0


def _cards(*rows: Card) -> dict[str, Card]:
    return {row.name: row for row in rows}


# Sources: NVIDIA data sheets and architecture white papers (Ampere, Ada, Hopper, Blackwell), AMD's MI300X data sheet.
CARDS = _cards(
    Card("b200", 2250, 180, 8000, 64, 900),
    Card("h200", 989, 141, 4800, 64, 450),
    Card("h100", 989, 80, 3350, 64, 450),
    Card("h100-pcie", 756, 80, 2000, 64, 300),
    Card("h800", 989, 80, 3350, 64, 200),
    Card("h20", 148, 96, 4000, 64, 450),
    Card("a100", 312, 80, 2039, 32, 300),
    Card("a100-40gb", 312, 40, 1555, 32, 300),
    Card("a800", 312, 80, 2039, 32, 200),
    Card("a40", 149.7, 48, 696, 32, 56),
    Card("a10", 125, 24, 600),
    Card("a6000", 154.8, 48, 768, 32, 56),
    Card("v100", 125, 32, 900, 16, 150),
    Card("t4", 65, 16, 320, 16),
    Card("l40s", 362, 48, 864),
    Card("l40", 181, 48, 864),
    Card("l20", 119.5, 48, 864),
    Card("l4", 121, 24, 300),
    Card("rtx6000ada", 364, 48, 960),
    Card("rtx2000ada", 48, 16, 224, 16),  # x8 slot
    Card("rtxpro6000", 503, 96, 1792, 64),
    Card("rtx5090", 209.5, 32, 1792, 64),
    Card("rtx5080", 112.6, 16, 960, 64),
    Card("rtx4090", 165.2, 24, 1008),
    Card("rtx4090d", 147, 24, 1008),
    Card("rtx4080", 97.5, 16, 717),
    Card("rtx3090", 71, 24, 936, 32, 56),
    Card("mi300x", 1307, 192, 5300, 64, 448),
)
# Words that the driver or a person puts before or after the card's own name.
_MAKERS = {"nvidia", "amd", "geforce", "quadro", "tesla", "instinct"}
# A card that is sold in two kinds under one name: (its name, a word that tells the other kind) -> that kind.
_KINDS = {("h100", "pcie"): "h100-pcie", ("a100", "40gb"): "a100-40gb"}
_OTHER_CARDS = {"laptop", "mobile", "maxq"}


def find_card(name: str) -> Card:
    """The card called `name`, as a person or the driver writes it. Raises RequestError naming the known ones."""
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


@dataclass(frozen=True)
class Interconnect:
    """The links between the cards of a box. `rate`: nominal GB/s that can leave a card, one way, by all its ways."""

    name: str
    rate: float


LINKS = {
    link.name: link
    for link in (
        Interconnect("nvlink3", 300),
        Interconnect("nvlink4", 450),
        Interconnect("nvlink5", 900),
        Interconnect("xgmi", 448),
        Interconnect("nvlink-pairs", 56 + 32),  # a bridge to one card, PCIe to the others
        Interconnect("pcie3", 16),
        Interconnect("pcie4", 32),
        Interconnect("pcie5", 64),
    )
}


def find_link(name: str, card: Card) -> Interconnect:
    """The link called `name` between cards of this kind: one of LINKS, or `nvlink` / `pcie` for the card's own.

    Raises RequestError naming the known ones.
    """
    text = name.strip().lower()
    if text in ("nvlink", "nvswitch"):
        if not card.nvlink:
            raise RequestError(
                f"link {name!r}: {card.name} has no NVLink; use pcie, or a link named in full."
            )
        if card.nvlink < 100:  # a bridge joins two cards
            return Interconnect("nvlink-pairs", card.nvlink + card.pcie)
        return Interconnect(f"nvlink {card.nvlink:.0f} GB/s", card.nvlink)
    if text == "pcie":
        return Interconnect(f"pcie {card.pcie:.0f} GB/s", card.pcie)
    if text in LINKS:
        return LINKS[text]
    raise RequestError(
        f"link {name!r} is unknown; known are nvlink, pcie (as wide as the card's own), {', '.join(sorted(LINKS))}."
    )
