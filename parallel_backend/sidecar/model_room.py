"""The memory of the models that ranks hold, as ComfyUI's process knows it, and which to drop for another one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..devices import is_cpu
from ..errors import CheckpointError
from ..host_memory import available_memory, host_memory
from ..requests import LoadInfo, ModelSpec
from ..strategy import ParallelStrategy
from ..wire.file_identity import FileIdentity, find_identity, read_identity
from ..wire.protocol import RankModels

# The maximum of held models that take no memory of their own: on the CPU, whole weights are the mapped file. Their
# modules take some memory, and unused pages of a file push out others. Four: an expert, its partner, a base, its
# refiner.
MOST_MAPPED = 4
# The share of a GPU's memory, and of the host's, that a model loaded beside others leaves free of weights: a call for a
# large image or a short video takes that much. If a call takes more, the other models are dropped then
# (RankHoldings.drop_conflicting).
FREE_FOR_CALLS = 0.1
LACK_OF_MEMORY = "for lack of memory"
_numbers = itertools.count(1)


def new_number() -> int:
    """Returns a number, unique in this process, for a model, text encoder or VAE that ranks will hold."""
    return next(_numbers)


@dataclass(frozen=True)
class ModelKey:
    """The key of a loaded model. `weights`: how it is split over the ranks (ParallelStrategy.weights); `identity`: of
    its file, since a path can be overwritten."""

    spec: ModelSpec
    weights: ParallelStrategy
    identity: FileIdentity

    @classmethod
    def of(cls, spec: ModelSpec, strategy: ParallelStrategy, file: FileIdentity | None = None) -> ModelKey:
        """Returns the key for `file`, by default the file at the path now. Raises CheckpointError if there is none."""
        spec = absolute(spec)
        return cls(spec, strategy.weights, file or read_identity(spec.path))

    @property
    def name(self) -> str:
        return Path(self.spec.path).name


def absolute(spec: ModelSpec) -> ModelSpec:
    """Returns `spec` with an absolute path."""
    return spec if Path(spec.path).is_absolute() else replace(spec, path=str(Path(spec.path).absolute()))


@dataclass(frozen=True)
class Room:
    """Bytes for weights: on each rank's accelerator, and in host memory as the sum over all ranks."""

    devices: tuple[int, ...]
    host: int = 0

    def __bool__(self) -> bool:
        return self.host > 0 or any(self.devices)

    def __add__(self, other: Room) -> Room:
        both = zip(self.devices, other.devices, strict=True)
        return Room(tuple(mine + more for mine, more in both), self.host + other.host)

    def lacks(self, needed: Room) -> Room:
        """Returns the bytes of `needed` that exceed this room, by place."""

        def missing(size: int, room: int) -> int:
            return max(0, size - room) if size else 0

        return Room(tuple(map(missing, needed.devices, self.devices)), missing(needed.host, self.host))

    def shares_a_place_with(self, other: Room) -> bool:
        pairs = [(self.host, other.host), *zip(self.devices, other.devices, strict=True)]
        return any(mine > 0 and theirs > 0 for mine, theirs in pairs)


@dataclass(eq=False)
class CountedModel:
    """A model that the ranks hold under `number`. `takes`: the memory that it occupies; `offloaded_ranks`: the ranks
    that have given back its device memory for now."""

    number: int
    key: ModelKey
    info: LoadInfo
    takes: Room
    offloaded_ranks: frozenset[int] = frozenset()

    def bytes_on(self, rank: int) -> int:
        """Returns the bytes that it occupies on the rank's accelerator now."""
        return 0 if rank in self.offloaded_ranks else self.takes.devices[rank]

    def check_file(self) -> None:
        """Raises CheckpointError if its file is shorter than it was. Ranks still map the old one if its path leads to
        another file, or to none."""
        pinned, found = self.key.identity, find_identity(self.key.spec.path)
        if found is not None and found.is_place_of(pinned) and found.size < pinned.size:
            raise CheckpointError(
                f"{self.key.name} was cut short while the devices read it: of {pinned.size} bytes {found.size} are "
                f"left. Download the file again, or choose another one; the devices start again with the next prompt."
            )


@dataclass(frozen=True)
class CountedModule:
    """A text encoder or VAE that ranks hold. `rank`: the one that computes it, ALL_RANKS if all do; `infos`: the record
    of its load on each rank."""

    rank: int
    infos: tuple[LoadInfo, ...]


def predict_room(key: ModelKey, devices: Sequence[str]) -> Room:
    """Predicts the room that a model will take: the ranks' shares of the file. Other contents of a checkpoint, and
    casts to another dtype, are known only after a first load."""
    weights, nothing = key.weights, (0,) * len(devices)
    file_bytes, on_cpu = key.identity.size, is_cpu(devices)
    if weights.offload_weights or (on_cpu and weights.shards):
        return Room(nothing, file_bytes)
    if on_cpu:
        return Room(nothing)
    return Room((share_of_file(weights, file_bytes),) * len(devices))


def share_of_file(strategy: ParallelStrategy, file_bytes: int) -> int:
    """Returns approximately how many bytes of the file lie on one rank's accelerator."""
    if strategy.offload_weights:
        return 0
    parts = strategy.world_size if strategy.shards else strategy.pipefusion_degree * strategy.tensor_degree
    return file_bytes // parts


def free_room(ranks: Sequence[RankModels]) -> Room:
    """Returns the room that there is for weights now."""
    memory = host_memory()
    return Room(
        tuple(int(rank.free_bytes - FREE_FOR_CALLS * rank.total_bytes) for rank in ranks),
        int(available_memory(memory) - FREE_FOR_CALLS * memory),
    )


def choose_to_drop(
    held: Sequence[CountedModel], key: ModelKey, needed: Room, free: Room
) -> dict[CountedModel, str]:
    """Returns the models to drop for `key`, each with the reason. `held`: least recently used first."""
    found: dict[CountedModel, str] = {}
    for model in held:
        if model.key.spec == key.spec and model.key.identity != key.identity:
            found[model] = "its file has changed"
        elif model.key.spec == key.spec and model.takes:
            found[model] = "it is split another way now"
    staying = [model for model in held if model not in found]
    if not needed:
        mapped = [model for model in staying if not model.takes]
        for model in mapped[: max(0, len(mapped) - MOST_MAPPED + 1)]:
            found[model] = f"{MOST_MAPPED} are the most"
    for model in found:
        free += model.takes
    for model in staying:
        if model.takes.shares_a_place_with(free.lacks(needed)):
            found[model] = LACK_OF_MEMORY
            free += model.takes
    return found


def slowest(infos: Sequence[LoadInfo]) -> LoadInfo:
    """Returns one record of a load for all ranks: the longest time, the most memory."""
    return replace(
        infos[0],
        seconds=max(info.seconds for info in infos),
        device_bytes=max(info.device_bytes for info in infos),
        host_bytes=max(info.host_bytes for info in infos),
    )
