"""The providers of models as data: who reads a file's header, and who loads it in a rank. Imported when first asked."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..wire.heartbeat import STARTED, heartbeat
from .model_file import ModelFile

if TYPE_CHECKING:  # commands that only plan need no torch
    from collections.abc import Sequence

    import torch

    from ..requests import ModelSpec
    from .base import ModelPart, ModuleModel


@dataclass(frozen=True)
class Provider:
    """A way to run models. `inspect`: "module:function" below this package, from a path to a ModelFile, without tensors
    and without the library that computes; `load`: in a rank, from a ModelSpec, a device, a ModelPart and the devices of
    all ranks to a model."""

    name: str
    inspect: str
    load: str


PROVIDERS = (
    Provider("flux", inspect="diffusers.checkpoint:inspect_flux", load="diffusers.load:load"),
    Provider("comfyui", inspect="comfyui.model_file:inspect", load="comfyui.load:load"),
)


def provider_of(family: str) -> Provider:
    """The provider of ModelSpec.family; empty for the first one. Raises RequestError for a name that none has."""
    for provider in PROVIDERS:
        if family in ("", provider.name):
            return provider
    known = ", ".join(provider.name for provider in PROVIDERS)
    raise RequestError(f"model family {family!r} is unknown; this version knows {known}.")


def inspect_model(path: str, family: str = "") -> ModelFile:
    """The model in the file at `path`, by its header. Raises CheckpointError for a file that is refused."""
    return imported(provider_of(family).inspect)(path)


def import_for(spec: ModelSpec, device: torch.device) -> None:
    """What load_model imports: seconds, the first time. Raises RequestError for what a process cannot import."""
    imported(provider_of(spec.family).load)
    if spec.comfyui is not None:
        imported("comfyui.environment:import_comfyui")(spec.comfyui, device)


def load_model(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> ModuleModel:
    """The model, or a rank's part of it, on a device. `peers`: the devices of all ranks, which compute in one dtype.

    Raises CheckpointError for a file that is refused.
    """
    load = imported(provider_of(spec.family).load)
    heartbeat.loading(STARTED)
    return load(spec, device, part, peers)


def imported(reference: str) -> Any:
    """The function or value that "module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f".{module}", __package__), name)
