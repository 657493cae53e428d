"""The providers of models: functions that read a file's header or load it in a rank, imported at first use."""

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
    """A way to run models: functions, named "module:function" below this package. `inspect`: turns a path into a
    ModelFile without reading tensors or importing the computing library; `load`: turns a ModelSpec, a device, a
    ModelPart and the devices of all ranks into a model, in a rank; `check`: refuses a path of another family, in any
    format that ComfyUI's modules read."""

    name: str
    inspect: str
    load: str
    check: str


PROVIDERS = (
    Provider(
        "flux",
        inspect="diffusers.checkpoint:inspect_flux",
        load="diffusers.load:load",
        check="diffusers.checkpoint:check_is_flux",
    ),
    Provider(
        "comfyui",
        inspect="comfyui.model_file:inspect",
        load="comfyui.load:load",
        check="comfyui.model_file:inspect",
    ),
)


def provider_of(family: str) -> Provider:
    """Returns the provider of ModelSpec.family; "" gives the first one. Raises RequestError for an unknown name."""
    for provider in PROVIDERS:
        if family in ("", provider.name):
            return provider
    known = ", ".join(provider.name for provider in PROVIDERS)
    raise RequestError(f"model family {family!r} is unknown; this version knows {known}.")


def inspect_model(path: str, family: str = "") -> ModelFile:
    """Returns the facts of the model at `path`, from its header. Raises CheckpointError for a file that is refused."""
    return imported(provider_of(family).inspect)(path)


def check_family(path: str, family: str) -> None:
    """Raises CheckpointError for a file of another family than `family`, in any format that ComfyUI's modules read."""
    imported(provider_of(family).check)(path)


def import_for(spec: ModelSpec, device: torch.device) -> None:
    """Imports what load_model needs, which takes seconds the first time. Raises RequestError if it cannot."""
    imported(provider_of(spec.family).load)
    if spec.comfyui is not None:
        imported("comfyui.environment:import_comfyui")(spec.comfyui, device)


def load_model(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> ModuleModel:
    """Loads the model, or a rank's part of it. `peers`: the devices of all ranks, which compute in one dtype.

    Raises CheckpointError for a file that is refused.
    """
    load = imported(provider_of(spec.family).load)
    heartbeat.loading(STARTED)
    return load(spec, device, part, peers)


def imported(reference: str) -> Any:
    """Returns the function or value that "module:name" names, below this package."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f".{module}", __package__), name)
