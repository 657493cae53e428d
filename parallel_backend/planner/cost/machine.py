"""What this machine is to the cost model (which card and which link decide), and what `auto` chooses on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import RequestError
from ...models.catalog import Family, flux_family
from ...strategy import ModelShape, ParallelStrategy
from ...wire.calibration import Calibration
from ..candidate_table import CandidateEstimate, outlooks_of
from ..history.records import strategy_of
from ..machine.cards import Card, Domain, Interconnect, find_card
from ..machine.topology import PATHS, Topology
from ..ranking import Ranking, choose, enumerate_candidates
from .communication import Candidate, Work
from .measured_links import measured_constants
from .model import DEFAULT, USABLE_MEMORY, Machine, fixed_seconds

# A socket's links to the other, nominal GB/s one way: about two or three UPI or xGMI links of 20 GB/s.
SOCKET_LINK = 32.0
# PCIe 4.0 x16, where NVML does not say.
USUAL_PCIE = 32.0


def model_machine(topology: Topology) -> tuple[Machine, tuple[str, ...]]:
    """(machine, notes) for equal shares over all devices. Raises RequestError where there is nothing to model.

    With cards that differ, the slowest decides the time and the smallest the memory.
    """
    if not topology.devices:
        raise RequestError(
            "There is no GPU here, and the CPU has no data sheet: only a measurement can tell."
        )
    cards, notes = [], []
    for device in topology.devices:
        card = find_card(device.name.split(" MIG ")[0])
        if device.is_mig:
            # A slice has its share of the memory and about the same share of everything else.
            part = device.memory / (card.memory * 1e9)
            card = replace(card, tflops=card.tflops * part, bandwidth=card.bandwidth * part)
        cards.append(card)
    slowest = min(cards, key=lambda c: c.tflops)
    if topology.mixed:
        names = ", ".join(sorted({d.name for d in topology.devices}))
        notes.append(f"The cards differ ({names}): with an even split all wait for the {slowest.name}.")
    memory = min(d.memory for d in topology.devices) * USABLE_MEMORY
    count = _joinable(topology)
    if count < len(topology.devices):
        notes.append(
            f"Slices of one GPU cannot work together (NCCL does not join them), so {count} of the "
            f"{len(topology.devices)} can be used; list one slice per GPU first."
        )
    return Machine(slowest, link_of(topology, slowest), count, memory), tuple(notes)


def _joinable(topology: Topology) -> int:
    """How many of the devices, from the first on, NCCL can join: at most one slice of each GPU."""
    parents: set[str] = set()
    for count, device in enumerate(topology.devices):
        if device.is_mig and device.parent in parents:
            return count
        parents.add(device.parent)
    return len(topology.devices)


def link_of(topology: Topology, card: Card) -> Interconnect:
    """The link that the paths between the devices amount to, ranks in the devices' order."""
    pairs = [pair for _, _, pair in topology.pairs]
    pcie = min((d.pcie for d in topology.devices if d.pcie), default=USUAL_PCIE)
    if not pairs:
        return Interconnect("one device", "pcie", pcie)
    if all(p.path == "NVSWITCH" for p in pairs) or all(p.path == "NVLINK" for p in pairs):
        rate = min(p.rate for p in pairs)
        return Interconnect(f"{topology.kind} {rate:.0f} GB/s", "nvlink", rate)
    if any(p.path in ("NVSWITCH", "NVLINK") for p in pairs):
        size = _domain(topology, "NVLINK")
        rate = max(p.rate for p in pairs)
        if size > 1:
            outside = Domain(size, pcie, crossing=True)
            return Interconnect(f"NVLink in groups of {size}, else PCIe", "nvlink", rate, (outside,))
    if any(p.peer is False for p in pairs):
        return Interconnect(
            f"PCIe {pcie:.0f} GB/s without peer access", "host", pcie, (), host_total=4 * pcie
        )
    domains = []
    if (size := _domain(topology, "PXB")) > 1:
        domains.append(Domain(size, pcie))
    if 1 < (size := _domain(topology, "NODE")) < len(topology.devices):
        domains.append(Domain(size, SOCKET_LINK, crossing=True))
    elif topology.kind == "SYS" and size == 1:
        domains.append(Domain(1, SOCKET_LINK, crossing=True))
    return Interconnect(f"PCIe {pcie:.0f} GB/s ({topology.kind})", "pcie", pcie, tuple(domains))


def _domain(topology: Topology, at_least: str) -> int:
    """Size of the equal groups of neighbouring devices whose paths are at least this good; 1 where there are none."""
    devices = topology.devices
    limit = PATHS.index(at_least)
    for size in range(len(devices), 1, -1):
        if len(devices) % size:
            continue
        groups = [devices[i : i + size] for i in range(0, len(devices), size)]
        if all(
            PATHS.index(topology.pair(a.uuid, b.uuid).path) <= limit
            for group in groups
            for k, a in enumerate(group)
            for b in group[k + 1 :]
        ):
            return size
    return 1


def neighbours_first(topology: Topology) -> tuple[str, ...]:
    """UUIDs ordered so that well-joined devices follow each other: the order in which ranks should sit on them."""
    left = [d.uuid for d in topology.devices]
    order: list[str] = []
    while left:
        block = [left.pop(0)]
        best = max((topology.pair(block[0], u).rate for u in left), default=0.0)
        paths = [PATHS.index(topology.pair(block[0], u).path) for u in left]
        nearest = min(paths, default=0)
        for u in list(left):
            pair = topology.pair(block[0], u)
            if pair.rate == best and PATHS.index(pair.path) == nearest:
                block.append(u)
                left.remove(u)
        order += block
    return tuple(order)


@dataclass(frozen=True)
class AutoAdvice:
    """`choice` is None where nothing can be predicted (CPU, unknown card): the rule decides. `notes`: in words.

    `outlooks`: the candidates of `choice` for a person, in its order.
    """

    choice: Ranking | None
    notes: tuple[str, ...] = ()
    outlooks: tuple[CandidateEstimate, ...] = ()

    @property
    def strategy(self) -> ParallelStrategy | None:
        """What to run."""
        return strategy_of(self.choice.best.candidate) if self.choice else None


def flux_work(
    dims, tensor_bytes: int, *, width: int, height: int, text: int, batch: int, has_cfg: bool, steps: int
) -> Work:
    """The job of sampling with a Flux file. `dims`: its flux_keys.FluxDims; `tensor_bytes`: its own; in pixels."""
    family: Family = flux_family(dims.hidden, dims.heads, dims.double_blocks, dims.single_blocks)
    return Work(
        family,
        width,
        height,
        batch=batch,
        rows=2 if has_cfg else 1,
        steps=max(1, steps),
        storage=tensor_bytes / family.parameters,
        text=text,
    )


def choose_here(
    work: Work,
    model: ModelShape,
    topology: Topology,
    *,
    engine: str = "auto",
    one_gpu_s: float | None = None,
    measured: Mapping[Candidate, float] | None = None,
    mode: str = "eager",
    calibrations: Sequence[Calibration] = (),
    approximation: str = "if_needed",
    memory_of: Callable[[Candidate], float] | None = None,
) -> AutoAdvice:
    """The best strategy that this version can run on these devices or fewer of them, ranks in the topology's order.

    `calibrations`: what the ranks measured of the links between these devices, one entry per rank; then `approximation`
    "allowed" may choose PipeFusion for speed. `memory_of`: as choice.choose takes it.
    """
    try:
        machine, notes = model_machine(topology)
    except RequestError as error:
        return AutoAdvice(None, (str(error),))
    candidates = [
        c
        for c in enumerate_candidates(work, machine.count)
        if not strategy_of(c).violations(model, machine.count, engine)
    ]
    choice = choose(
        candidates,
        work,
        machine,
        one_gpu_s=one_gpu_s,
        measured=measured,
        mode=mode,
        constants=measured_constants(calibrations, machine.link) if calibrations else DEFAULT,
        links_measured=bool(calibrations),
        approximation=approximation,
        memory_of=memory_of,
    )
    fixed_s = fixed_seconds(work, machine.card)
    return AutoAdvice(choice, (*topology.notes, *notes), outlooks_of(choice, work.steps, fixed_s))
