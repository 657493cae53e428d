"""The payload that carries a job to the ranks: its head as a tensor of bytes, and the tensors that they lack."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .changes import NetworkChange
from .restore import Replaced
from .tensors import Print

HEAD = "job"  # name of the tensor with the bytes of the head
INPUTS = "inputs"  # name of a VAE's input: it is large, and no later job refers to it
ANSWER, DENOISED = "latent", "denoised"  # names of tensors in the answer
STEP = "step"  # name of the numbers of a step whose latents a job sends (pack_step)


@dataclass(frozen=True)
class SamplerRun:
    """A run of ComfyUI's guider with the wrappers around its `outer_sample`. `arguments`: noise, latent, sampler,
    sigmas, mask and seed; `latent_shapes`: the value that ComfyUI passes."""

    guider: Any
    wrappers: Sequence[Any]
    arguments: tuple[Any, ...]
    latent_shapes: Any


@dataclass(frozen=True)
class NetworkCall:
    """One call of the network outside of a sampler. `patcher`: ComfyUI's ModelPatcher, which patches the weights."""

    patcher: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class EncoderCall:
    """One call of a text encoder: `method` of its module at `path`. `patcher`: ComfyUI's ModelPatcher, which patches
    the weights."""

    patcher: Any
    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class HeldTextEncoder:
    """A text encoder for ranks to hold. `kind`: the class of its ModelPatcher."""

    module: nn.Module
    kind: type


@dataclass(frozen=True)
class HalfVae:
    """The decoder or the encoder of a VAE, for ranks to hold. `module`: ComfyUI's network without the other half;
    `latent_channels`: C of the latent [B, C, (t,) h, w]; `latent_dims`: 3 with t, else 2; `dtype`: compute dtype on a
    GPU (CPU: float32). Encoders only: `scale`: pixels per latent position along a side; `in_channels`: of a pixel."""

    module: nn.Module
    encodes: bool
    latent_channels: int
    latent_dims: int
    dtype: torch.dtype
    scale: int = 1
    in_channels: int = 3


@dataclass(frozen=True)
class VaeCall:
    """One call of half a VAE on INPUTS: a latent [B, C, (t,) h, w] or pixels [B, C, (T,) H, W]. `shares`: one number
    per rank, its relative share of each input; empty for equal shares."""

    shares: tuple[float, ...]


Work = SamplerRun | NetworkCall | EncoderCall | VaeCall | HeldTextEncoder | HalfVae


@dataclass(frozen=True)
class PickledJob:
    """A job before it is pickled. `work`: what to run, or the module to load; `replaced`: what packs have replaced in
    ComfyUI's modules, and set in their own; `changes`: what nodes have changed in the network; `random_states`: of
    torch, Python, numpy and the GPU; `settings`: torch's (torch_settings.py); `cache_threshold`: of the step cache, 0
    without one; `sends_steps`: True if ComfyUI's process gets each step's latents; `objects`: in a rank, those that it
    consists of, by number."""

    work: Work
    replaced: Sequence[Replaced]
    changes: Sequence[NetworkChange]
    random_states: Sequence[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    cache_threshold: float = 0.0
    sends_steps: bool = False
    objects: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """The head of a payload. `job`: a PickledJob as bytes; `is_fresh`: True if it refers to no tensor of earlier jobs;
    `dropped`: numbers of tensors that no later job refers to; `facts`: pickled ProcessFacts, None if the ranks have
    them; `packs`: names of the packs whose code the job contains; `mode`: the token mode that the model's class is
    proven for; `inputs`: the values of the model's InputShapes; `prints`: of the loader's parameters, None if the ranks
    have compared them; `digests`: of the code of `packs`, only for ranks on other machines."""

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
    """The facts of ComfyUI's process that ranks need. `comfyui`: ComfyUI's folder; `version`: its version; `pack_name`:
    the module name of this pack; `packs`: (file, True if it is a package) of the other packs by module name;
    `search_path`: sys.path; `folders`: attributes of ComfyUI's folder_paths."""

    comfyui: str
    version: str
    pack_name: str
    packs: dict[str, tuple[str, bool]]
    search_path: tuple[str, ...]
    folders: dict[str, Any]


def digest_of_code(file: str, is_package: bool) -> str:
    """Returns a digest of a pack's Python files: it is the same on two machines that have the same version."""
    folder = Path(file).parent
    found = sorted(folder.rglob("*.py")) if is_package else [Path(file)]
    digest = hashlib.sha256()
    for one in found:
        digest.update(f"{one.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(one.read_bytes()).digest())
    return digest.hexdigest()


def pack_facts(facts: ProcessFacts) -> bytes:
    """Returns the facts as bytes; unpickling.unpack_facts reads them."""
    return pickle.dumps(_values(facts))


def pack_payload(head: Head, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the payload of a message to the ranks. `tensors`: by number, written as a string."""
    data = torch.frombuffer(bytearray(pickle.dumps(_values(head))), dtype=torch.uint8)
    return {HEAD: data, **{number: one.detach().cpu().contiguous() for number, one in tensors.items()}}


def pack_answer(answer: Tensor | Sequence[Tensor], denoised: Tensor | None = None) -> dict[str, Tensor]:
    """Returns an answer as float32 tensors on the CPU. `answer`: a latent or the output of a network, one tensor or
    several (video and sound); `denoised`: the denoised latent of the last step."""
    of_last_step = {} if denoised is None else {DENOISED: denoised.float().cpu()}
    parts = [answer] if isinstance(answer, Tensor) else answer
    names = [ANSWER, *(f"{ANSWER}.{place}" for place in range(1, len(parts)))]
    return {**{name: part.float().cpu() for name, part in zip(names, parts, strict=True)}, **of_last_step}


def pack_step(step: int, denoised: Tensor, x: Tensor, steps: int) -> dict[str, Tensor]:
    """Returns what a sampler gives its callback as tensors: a step's denoised latent and its latent, of all images. A
    node's own callback gets them in ComfyUI's process."""
    return {STEP: torch.tensor([step, steps]), f"{STEP}.denoised": denoised, f"{STEP}.x": x}


def unpack_step(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[int, Tensor, Tensor, int]:
    """Returns what pack_step packed, on `device`."""
    step, steps = tensors[STEP].tolist()
    return step, tensors[f"{STEP}.denoised"].to(device), tensors[f"{STEP}.x"].to(device), steps


def unpack_answer(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the answer that pack_answer packed, an empty list if there is none."""
    names = sorted(name for name in tensors if name == ANSWER or name.startswith(f"{ANSWER}."))
    return [tensors[name] for name in names]


def _values(data: Head | ProcessFacts) -> tuple[Any, ...]:
    """Returns the fields as plain values, so that unpickling need not look up the class."""
    return tuple(getattr(data, one.name) for one in fields(data))
