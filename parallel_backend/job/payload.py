"""A sampling job as it travels: its head in one tensor of bytes, and each tensor that the ranks do not hold yet."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .changes import NetworkChange
from .prints import Print
from .restore import Replaced

HEAD = "job"  # the name of the tensor of bytes
INPUTS = "inputs"  # the name of what a VAE is given: large, and nothing that another job names
ANSWER, DENOISED = "latent", "denoised"  # the names of tensors in the answer


@dataclass(frozen=True)
class SamplerRun:
    """ComfyUI's guider with the wrappers around its `outer_sample`. `arguments`: noise, latent, sampler, sigmas, mask
    and seed; `latent_shapes`: as ComfyUI passes them."""

    guider: Any
    wrappers: Sequence[Any]
    arguments: tuple[Any, ...]
    latent_shapes: Any


@dataclass(frozen=True)
class NetworkCall:
    """One call of the network outside of a sampler, with the weights as `patcher`, ComfyUI's, has patched them."""

    patcher: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class EncoderCall:
    """One call of a text encoder: of `method` of its module at `path`, with the weights as `patcher`, ComfyUI's, has
    patched them."""

    patcher: Any
    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class HeldTextEncoder:
    """A text encoder as ranks hold it. `kind`: the class of its ModelPatcher."""

    module: nn.Module
    kind: type


@dataclass(frozen=True)
class HalfVae:
    """The decoder of a VAE as ranks hold it, or its encoder. `module`: ComfyUI's network without the other half;
    `latent_channels`, `latent_dims`: of the latent [B, C, (t,) h, w], 2 or 3; `dtype`: which it is computed in, but on
    the CPU. Of an encoder, `scale`: pixels per position of the latent along each side; `in_channels`: of a pixel."""

    module: nn.Module
    encodes: bool
    latent_channels: int
    latent_dims: int
    dtype: torch.dtype
    scale: int = 1
    in_channels: int = 3


@dataclass(frozen=True)
class VaeCall:
    """One call of half a VAE with INPUTS, a latent [B, C, (t,) h, w] or pixels [B, C, (T,) H, W]. `shares`: how much of
    each every rank takes; empty for equal shares."""

    shares: tuple[float, ...]


Work = SamplerRun | NetworkCall | EncoderCall | VaeCall | HeldTextEncoder | HalfVae


@dataclass(frozen=True)
class PickledJob:
    """`work`: what to run, or the module that a load brings; `replaced`: in ComfyUI's modules; `changes`: of the
    network; `random_states`: of torch, Python, numpy and the GPU; `cache_threshold`: of the step cache, 0 without one.
    """

    work: Work
    replaced: Sequence[Replaced]
    changes: Sequence[NetworkChange]
    random_states: tuple[Any, ...]
    cache_threshold: float = 0.0


@dataclass(frozen=True)
class Head:
    """`job`: a PickledJob; `is_fresh`: it names no tensor of an earlier job; `dropped`: numbers of tensors that
    no job will name again; `facts`: pickled ProcessFacts, None where the ranks have them; `packs`: those whose code the
    job has; `mode`: a token mode, as far as the class is proven; `inputs`: the values of the model's InputShapes;
    `prints`: of the loader's parameters, None where the ranks have compared them; `digests`: of the code of `packs`,
    for ranks on other machines."""

    job: bytes
    is_fresh: bool
    dropped: tuple[int, ...]
    facts: bytes | None
    packs: tuple[str, ...]
    mode: str
    inputs: tuple[Any, ...]
    prints: dict[str, Print] | None
    digests: dict[str, str]


@dataclass(frozen=True)
class ProcessFacts:
    """The facts of ComfyUI's process that ranks need. `comfyui`: its folder; `version`: ComfyUI's; `pack_name`: this
    pack's name there; `packs`: their files, by name; `search_path`: sys.path; `folders`: attributes of ComfyUI's
    folder_paths."""

    comfyui: str
    version: str
    pack_name: str
    packs: dict[str, tuple[str, bool]]
    search_path: tuple[str, ...]
    folders: dict[str, Any]


def digest_of_code(file: str, is_package: bool) -> str:
    """A digest of a pack's Python files, by which two machines tell whether they have the same."""
    folder = Path(file).parent
    found = sorted(folder.rglob("*.py")) if is_package else [Path(file)]
    digest = hashlib.sha256()
    for one in found:
        digest.update(f"{one.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(one.read_bytes()).digest())
    return digest.hexdigest()


def pack_facts(facts: ProcessFacts) -> bytes:
    """Writes the facts down; unpickling.unpack_facts reads them."""
    return pickle.dumps(_values(facts))


def pack_payload(head: Head, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The payload of a message to the ranks; `tensors`: by number."""
    data = torch.frombuffer(bytearray(pickle.dumps(_values(head))), dtype=torch.uint8)
    return {HEAD: data, **{number: one.detach().cpu().contiguous() for number, one in tensors.items()}}


def pack_answer(answer: Tensor | Sequence[Tensor], denoised: Tensor | None = None) -> dict[str, Tensor]:
    """A latent, or what a network gave: one tensor or several (video and sound), as float32 on the CPU; and what the
    last step of a sampler took for the latent without noise."""
    others = {} if denoised is None else {DENOISED: denoised.float().cpu()}
    parts = [answer] if isinstance(answer, Tensor) else answer
    names = [ANSWER, *(f"{ANSWER}.{place}" for place in range(1, len(parts)))]
    return {**{name: part.float().cpu() for name, part in zip(names, parts, strict=True)}, **others}


def unpack_answer(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Reads what pack_answer wrote; nothing where there is no answer."""
    names = sorted(name for name in tensors if name == ANSWER or name.startswith(f"{ANSWER}."))
    return [tensors[name] for name in names]


def _values(data: Head | ProcessFacts) -> tuple[Any, ...]:
    """Plain values, so that no class has to be found where they are read."""
    return tuple(getattr(data, field.name) for field in fields(data))
