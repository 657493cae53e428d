"""Cards and links as data, from the makers' data sheets, and how long a message pattern takes on a link.

Peak rates are dense bf16 tensor throughput with fp32 accumulation, without sparsity; memory in GB of 1e9 bytes; link
rates are nominal, one direction, per card. How much of a nominal rate is reached is a constant of the cost model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...errors import RequestError


@dataclass(frozen=True)
class Card:
    """One GPU model. `tflops`: dense bf16; `memory`: GB; `bandwidth` of it, `nvlink`, `pcie`: GB/s one way."""

    name: str
    tflops: float
    memory: float
    bandwidth: float
    pcie: float = 32.0
    nvlink: float = 0.0
    peer: bool = True  # False: the driver gives no peer access over PCIe (GeForce since the 40 series)
    known: bool = True


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
    Card("rtx5090", 209.5, 32, 1792, 64, peer=False),
    Card("rtx5080", 112.6, 16, 960, 64, peer=False),
    Card("rtx4090", 165.2, 24, 1008, peer=False),
    Card("rtx4090d", 147, 24, 1008, peer=False),
    Card("rtx4080", 97.5, 16, 717, peer=False),
    Card("rtx3090", 71, 24, 936, 32, 56, peer=False),
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
    raise RequestError(f"card {name!r} is unknown to the cost model; known are {', '.join(sorted(CARDS))}.")


@dataclass(frozen=True)
class Domain:
    """`size` neighbouring ranks that share one way out: `egress` GB/s, one direction, for all of them together.

    `crossing`: the way out leads to another socket or node, where less of the nominal rate is reached.
    """

    size: int
    egress: float
    crossing: bool = False


@dataclass(frozen=True)
class LinkLoad:
    """Bytes on the busiest card's port, on the busiest way out of each kind of domain, and altogether."""

    port: float
    ways: tuple[tuple[Domain, float], ...]
    everything: float


@dataclass(frozen=True)
class Interconnect:
    """The links between the cards of a box. `rate`: nominal GB/s one way per card, to its neighbours.

    `domains`: nested groups with a shared way out, smallest first (a PCIe switch, a socket, a node). `kind`: which
    constant says how much of the nominal rate is reached: "nvlink", "pcie", "host" (no peer access, copies through
    host memory), "network". `host_total`: GB/s that the host moves for all cards together when there is no peer access.
    """

    name: str
    kind: str
    rate: float
    domains: tuple[Domain, ...] = ()
    host_total: float = 0.0

    def load(self, traffic: Iterable[tuple[int, int, float]]) -> LinkLoad:
        """The load of messages (source rank, target rank, bytes) that start together on each shared resource."""
        out: dict[int, float] = {}
        leaving: dict[tuple[int, int], float] = {}
        for source, target, size in traffic:
            out[source] = out.get(source, 0.0) + size
            for domain in self.domains:
                if source // domain.size != target // domain.size:
                    key = (domain.size, source // domain.size)
                    leaving[key] = leaving.get(key, 0.0) + size
        busiest: dict[int, float] = {}
        for (size, _), sent in leaving.items():
            busiest[size] = max(busiest.get(size, 0.0), sent)
        ways = tuple((d, busiest[d.size]) for d in self.domains if d.size in busiest)
        return LinkLoad(max(out.values(), default=0.0), ways, sum(out.values()))

    def seconds(self, load: LinkLoad, reached: float, reached_outside: float) -> float:
        """The time of `load`: the busiest of a card's own port, the ways out of the domains, the host's memory.

        `reached`: share of the nominal rates that is reached; `reached_outside`: on a way to another socket or node.
        """
        times = [load.port / (self.rate * reached)]
        times += [sent / (d.egress * (reached_outside if d.crossing else reached)) for d, sent in load.ways]
        if self.host_total:
            times.append(load.everything / (self.host_total * reached))
        return max(times) / 1e9


# Two cards share a switch or host bridge with one x16 slot's rate upwards, four share a socket; the sockets are joined
# by two or three UPI/xGMI links (about 20 GB/s each way each), over which peer traffic is known to be slow.
def _pcie(name: str, rate: float) -> Interconnect:
    return Interconnect(name, "pcie", rate, (Domain(2, rate), Domain(4, rate, crossing=True)))


def _no_peer(name: str, rate: float) -> Interconnect:
    """Each transfer is a copy to host memory and one back; one socket moves about 100 GB/s for all cards."""
    return Interconnect(name, "host", rate, (), host_total=4 * rate)


LINKS = {
    link.name: link
    for link in (
        Interconnect("nvlink3", "nvlink", 300),
        Interconnect("nvlink4", "nvlink", 450),
        Interconnect("nvlink5", "nvlink", 900),
        Interconnect("xgmi", "nvlink", 448),
        Interconnect("nvlink-pairs", "nvlink", 56, (Domain(2, 32, crossing=True),)),
        _pcie("pcie3", 16),
        _pcie("pcie4", 32),
        _pcie("pcie5", 64),
        _no_peer("pcie3-nop2p", 16),
        _no_peer("pcie4-nop2p", 32),
        _no_peer("pcie5-nop2p", 64),
        Interconnect(
            "nvlink4+ib", "nvlink", 450, (Domain(8, 400, crossing=True),)
        ),  # eight NDR adapters of 50 GB/s a node
        Interconnect(
            "pcie4+eth",
            "pcie",
            32,
            (Domain(2, 32), Domain(4, 32, crossing=True), Domain(8, 12.5, crossing=True)),
        ),  # 100 Gb/s Ethernet
    )
}


def find_link(name: str, card: Card) -> Interconnect:
    """The link called `name` between cards of this kind: one of LINKS, or `nvlink` / `pcie` for the card's own.

    A PCIe link of cards that have no peer access goes through the host. Raises RequestError naming the known ones.
    """
    text = name.strip().lower()
    if text in ("nvlink", "nvswitch"):
        if not card.nvlink:
            raise RequestError(
                f"link {name!r}: {card.name} has no NVLink; use pcie, or a link named in full."
            )
        if card.nvlink < 100:  # a bridge joins two cards
            return replace(LINKS["nvlink-pairs"], rate=card.nvlink)
        return Interconnect(f"nvlink {card.nvlink:.0f} GB/s", "nvlink", card.nvlink)
    if text in ("pcie", "pcie-nop2p", "pcie-sys", "pcie+eth"):
        if text == "pcie+eth":
            return LINKS["pcie4+eth"]
        if text == "pcie-nop2p" or (text == "pcie" and not card.peer):
            return _no_peer(f"pcie {card.pcie:.0f} GB/s without peer access", card.pcie)
        return _pcie(f"pcie {card.pcie:.0f} GB/s", card.pcie)
    if text in LINKS:
        link = LINKS[text]
        if link.kind == "pcie" and not card.peer:
            return _no_peer(f"{text} without peer access", link.rate)
        return link
    raise RequestError(
        f"link {name!r} is unknown to the cost model; known are nvlink, pcie (as wide as the card's own), "
        f"{', '.join(sorted(LINKS))}."
    )
