"""A sampling job as it travels: its head in one tensor of bytes, and each tensor that the ranks do not hold yet."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .changes import NetworkChange
from .prints import Print
from .restore import Replaced

HEAD = "job"  # the name of the tensor of bytes


@dataclass(frozen=True)
class SamplerRun:
    """A job: ComfyUI's guider with the wrappers around its `outer_sample`. `arguments`: noise, latent, sampler, sigmas,
    mask and seed; `latent_shapes`: as ComfyUI passes them; `replaced`: in ComfyUI's modules; `changes`: of the network;
    `random_states`: of torch, Python, numpy and the GPU; `cache_threshold`: of the step cache, 0 without one."""

    guider: Any
    wrappers: Sequence[Any]
    arguments: tuple[Any, ...]
    latent_shapes: Any
    replaced: Sequence[Replaced]
    changes: Sequence[NetworkChange]
    random_states: tuple[Any, ...]
    cache_threshold: float = 0.0


@dataclass(frozen=True)
class Head:
    """`job`: a pickled SamplerRun; `is_fresh`: it names no tensor of an earlier job; `dropped`: numbers of tensors that
    no job will name again; `facts`: pickled ProcessFacts, None where the ranks have them; `packs`: those whose code the
    job has; `mode`: a token mode, as far as the class is proven; `prints`: of the loader's parameters, None where the
    ranks have compared them."""

    job: bytes
    is_fresh: bool
    dropped: tuple[int, ...]
    facts: bytes | None
    packs: tuple[str, ...]
    mode: str
    prints: dict[str, Print] | None


@dataclass(frozen=True)
class ProcessFacts:
    """What ranks need to know of ComfyUI's process. `comfyui`: its folder; `own`: this pack's name there; `packs`:
    their files, by name; `search_path`: sys.path; `folders`: attributes of ComfyUI's folder_paths."""

    comfyui: str
    own: str
    packs: dict[str, tuple[str, bool]]
    search_path: tuple[str, ...]
    folders: dict[str, Any]


def pack_facts(facts: ProcessFacts) -> bytes:
    """Writes the facts down; unpickling.unpack_facts reads them."""
    return pickle.dumps(_values(facts))


def pack_payload(head: Head, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The payload of a message to the ranks; `tensors`: by number."""
    data = torch.frombuffer(bytearray(pickle.dumps(_values(head))), dtype=torch.uint8)
    return {HEAD: data, **{number: one.detach().cpu().contiguous() for number, one in tensors.items()}}


def _values(data: Head | ProcessFacts) -> tuple[Any, ...]:
    """Plain values, so that no class has to be found where they are read."""
    return tuple(getattr(data, field.name) for field in fields(data))
