"""The models that a rank holds at the same time. A model of a file is held with its forwards.

ComfyUI's process numbers them and tells with each load which ones stay, so all ranks hold the same ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import RequestError
from ...requests import LoadInfo, ModelSpec, Placement
from ...wire.protocol import RankModels
from .device import weight_bytes

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.module_forward import ModuleForward
    from ...models.base import ModuleModel
    from ..jobs.modules import HeldEncoder
    from ..jobs.vaes import HeldVae


class HeldModel:
    """The model of a file. `moved_out`: its chunks that are in host memory or in the mapped file for now; `of_jobs`:
    its job.ModelOfJobs, None before the first job. Nothing else may hold that: it would outlive the model."""

    def __init__(self, model: ModuleModel) -> None:
        self.model = model
        self.moved_out: list[torch.nn.Module] = []
        self.forwards: dict[Placement, ModuleForward] = {}
        self.of_jobs: object | None = None

    def begin_request(self) -> None:
        """Has the forwards of earlier requests forget their notes on them."""
        for forward in self.forwards.values():
            forward.begin()

    def info(self, seconds: float, device: torch.device) -> LoadInfo:
        """Returns the record of its load on this rank's device, which took `seconds`."""
        model = self.model
        return LoadInfo(
            seconds,
            model.bytes,
            cached=False,
            dtype=model.stored_dtype,
            compute_dtype=str(model.compute_dtype).removeprefix("torch."),
            device_bytes=0 if device.type == "cpu" else weight_bytes(model.chunks, device),
            host_bytes=0 if model.byte_sharding is None else weight_bytes(model.chunks, torch.device("cpu")),
        )

    def move_out(self, device: torch.device) -> None:
        """Adds the chunks on `device` to `moved_out`, and frees the weights that the file still has. Offloaded weights
        are in host memory already."""
        gone = set(map(id, self.moved_out))
        self.moved_out = [
            chunk
            for chunk in self.model.chunks
            if id(chunk) in gone or next(chunk.parameters()).device.type == device.type
        ]
        if self.moved_out:
            self.model.leave_device()


class HeldModels:
    """The held models of files, text encoders and VAEs by number, in the order in which they are dropped when memory
    runs out. Dropping frees a device's memory at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[int, HeldModel | HeldEncoder | HeldVae] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[tuple[int, HeldModel]]:
        """Yields (number, model) of the models of files: only their weights are moved by the rank."""
        return ((number, held) for number, held in self._models.items() if isinstance(held, HeldModel))

    def get(self, number: int) -> HeldModel | HeldEncoder | HeldVae:
        """Returns the model with this number. Raises RequestError if there is none."""
        found = self._models.get(number)
        if found is None:
            raise RequestError(f"the processes hold no model {number}; load one first.")
        return found

    def of_file(self, number: int) -> HeldModel:
        """Returns the model of a file with this number. Raises RequestError if there is none."""
        found = self.get(number)
        if not isinstance(found, HeldModel):
            raise RequestError(f"model {number} is a text encoder or VAE; load one that samples.")
        return found

    def add(self, number: int, held: HeldModel | HeldEncoder | HeldVae) -> None:
        self._models[number] = held

    def keep(self, numbers: Sequence[int]) -> None:
        """Drops all other models. These are dropped in this order when memory runs out."""
        before, self._models = self._models, {n: self._models[n] for n in numbers if n in self._models}
        dropped = len(before) - len(self._models)
        del before
        if dropped:
            collect(self._device)

    def drop_first(self) -> None:
        self.keep([*self._models][1:])

    @property
    def chunks(self) -> tuple[torch.nn.Module, ...]:
        """The chunks of all models of files."""
        return tuple(chunk for _, held in self for chunk in held.model.chunks)

    def report(self) -> RankModels:
        """Returns the numbers of the held models and the device's memory, for ComfyUI's process."""
        if self._device.type != "cuda":
            return RankModels(tuple(self._models))
        free, total = torch.cuda.mem_get_info(self._device)
        # torch keeps freed memory for its next allocations.
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return RankModels(tuple(self._models), free + cached, total)


def import_for(spec: ModelSpec, device: torch.device, *, holds_nothing: bool) -> None:
    """Imports what loading `spec` needs. If the rank `holds_nothing`, it exempts all objects from garbage collection,
    which would scan half a million of them for each dropped model. A model held now would never be freed."""
    from ...models import registry

    registry.import_for(spec, device)
    if holds_nothing:
        if gc.get_freeze_count():  # a rank may have dropped models since; the first time there were none
            gc.collect()
        gc.freeze()


def collect(device: torch.device) -> None:
    """Frees unused objects, and the device memory that torch keeps for its next allocations."""
    gc.collect()
    release_cache(device)


def release_cache(device: torch.device) -> None:
    """Frees the device memory that torch keeps for its next allocations."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
