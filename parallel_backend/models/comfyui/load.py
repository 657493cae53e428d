"""Loads a rank's model from a mapped file by ComfyUI's own loaders: its detection, its conversions, its dtypes.

On the CPU the weights stay views of the mapping, so all ranks of a machine share one copy of the file. On a GPU, large
reads of the file bring them there (models/staging.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import CheckpointError, RequestError
from ...host_memory import give_back_pages
from ...requests import ComfyUISource, ModelSpec
from ..base import ModelPart
from ..dtypes import BYTES_PER_VALUE
from ..gguf_file import is_gguf
from ..staging import staged_reader
from ..tokens.table import TABLE
from .common_dtypes import agree_on_dtypes
from .environment import import_comfyui
from .file_weights import FileWeights
from .formats import gguf
from .formats.key_layouts import from_diffusers, without_prefix
from .formats.quantised import METADATA
from .formats.slices import Cut, slice_blocks
from .model import ComfyUIModel
from .model_file import ComfyUIModelFile, inspect
from .placing import absent_parameters, place

StateDict = dict[str, Tensor]

# Suffixes of tensor names by which a file describes its own quantisation.
_QUANTISED = (".comfy_quant", "scaled_fp8", ".weight_scale")


def load(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> ComfyUIModel:
    """Loads the model, or `part` of it, to `device`, with the dtypes that the weakest of `peers` supports. Raises
    CheckpointError for a file that ComfyUI does not know, RequestError if its modules cannot be split like that."""
    source = _source_of(spec)
    import_comfyui(source, device)
    read = _read(spec, source, device, peers)
    module = read.patcher.model.diffusion_model
    own = part or ModelPart()
    absent = absent_parameters(module, own)
    # Taken before they are moved: views of the mapping cost no memory.
    originals = {f"diffusion_model.{name}": value for name, value in module.named_parameters()}
    cuts = _sliced(module, own)
    with staged_reader(spec.path, read.opened, device) as staged:
        place(read.patcher.model, device, read.dtypes, own.byte_sharding, absent, staged)
    read.patcher.model.device = device
    give_back_pages(spec.path)  # all are copied or still in the page cache
    files = None
    if part is None:
        dtypes = {f"diffusion_model.{name}": dtype for name, dtype in read.dtypes.items()}
        open_reader = partial(staged_reader, spec.path, read.opened, device)
        files = FileWeights(read.patcher.model, originals, device, dtypes, open_reader)
    size, dtype = read.file.tensor_bytes, read.file.dtype
    return ComfyUIModel(read.patcher, device, size, dtype, originals, own.byte_sharding, files, cuts)


def map_model(spec: ModelSpec) -> Any:
    """Returns ComfyUI's patcher over the mapped weights of a file, which are read from disk when they are used. The
    process must have imported ComfyUI. Raises the same errors as `load`."""
    return _read(spec, _source_of(spec), torch.device("cpu"), ()).patcher


@dataclass(frozen=True)
class _Read:
    """A file's model over its mapped weights. `opened`: the mapping, None for GGUF; `dtypes`: by name, dtypes that
    parameters shall have on the device."""

    file: ComfyUIModelFile
    opened: safe_open | None
    patcher: Any
    dtypes: dict[str, torch.dtype]


def _source_of(spec: ModelSpec) -> ComfyUISource:
    if spec.comfyui is None:
        raise RequestError("a model of ComfyUI's own needs to know where ComfyUI is (ModelSpec.comfyui).")
    return spec.comfyui


def _read(
    spec: ModelSpec, source: ComfyUISource, device: torch.device, peers: Sequence[torch.device]
) -> _Read:
    packed = is_gguf(spec.path)
    opened, tensors, metadata = (None, gguf.mapped(spec.path), {}) if packed else map_tensors(spec.path)
    if source.part == "diffusion_model":
        tensors = without_prefix(tensors, metadata)
    file = inspect(spec.path)
    options: dict[str, Any] = {"load_device": device, "offload_device": torch.device("cpu")}
    options |= _options(spec, source)
    left_to_comfyui = "dtype" not in options and not _flag_sets_dtype()
    keeps_file_dtype = (
        left_to_comfyui and device.type == "cpu" and not packed and _is_plain(tensors, metadata)
    )
    if keeps_file_dtype and BYTES_PER_VALUE[file.dtype] < 4:
        # On the CPU ComfyUI computes in float32 and would copy the weights to it. Casting on use gives the same values.
        options["dtype"] = getattr(torch, file.dtype)
    import comfy.model_management

    if source.part == "diffusion_model" and _assigns_weights() and _is_plain(tensors, metadata):
        tensors = from_diffusers(tensors) or tensors
    with agree_on_dtypes(comfy.model_management, [peer for peer in peers if peer.type == "cuda"]):
        patcher, built = _load(spec.path, source.part, tensors, metadata, options)
    gguf.unpack_as(patcher.model.diffusion_model, built)
    return _Read(file, opened, patcher, {} if keeps_file_dtype else built)


def _sliced(module: nn.Module, part: ModelPart) -> dict[str, Cut]:
    """Cuts the layers of the module's blocks for tensor parallelism. Returns this rank's cut of each parameter by its
    name in ComfyUI's BaseModel."""
    if part.slices is None:
        return {}
    entry = TABLE.get(type(module).__name__)
    cuts = slice_blocks(module, () if entry is None else entry.regions, part.slices)
    return {f"diffusion_model.{name}": cut for name, cut in cuts.items()}


def map_tensors(path: str) -> tuple[safe_open, StateDict, dict[str, str]]:
    """Returns (the file, its tensors, its metadata). A tensor is read from disk when it is used."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
        return file, {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a .safetensors file: {error}. Check that it is there and whole."
        ) from error


def _is_plain(tensors: StateDict, metadata: dict[str, str]) -> bool:
    return METADATA not in metadata and not any(name.endswith(_QUANTISED) for name in tensors)


def _flag_sets_dtype() -> bool:
    """Returns True if a flag of ComfyUI's command line sets the dtype of weights (--bf16-unet and others)."""
    from comfy.cli_args import args

    return any(value is True for name, value in vars(args).items() if name.endswith("_unet"))


def _options(spec: ModelSpec, source: ComfyUISource) -> dict[str, Any]:
    """Returns the options that ComfyUI's own loader nodes would pass for these choices."""
    options: dict[str, Any] = {}
    if spec.weight_dtype != "auto":
        dtype = getattr(torch, spec.weight_dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise RequestError(
                f"weight_dtype {spec.weight_dtype!r} is none that weights can have; choose auto."
            )
        options["dtype"] = dtype
    if source.fp8_matmul:
        options["fp8_optimizations"] = True
    return options


def _load(
    path: str, part: str, tensors: StateDict, metadata: dict[str, str], options: dict[str, Any]
) -> tuple[Any, dict[str, torch.dtype]]:
    """Returns (ModelPatcher with the file's tensors as parameters, the dtype that ComfyUI built each parameter in)."""
    import comfy.model_patcher
    import comfy.sd

    with _parameters_assigned() as built, _refusing_damage(path):
        if part == "checkpoint":
            found = comfy.sd.load_state_dict_guess_config(
                tensors, False, False, False, output_model=True, model_options=options, metadata=metadata
            )
            patcher = None if found is None else found[0]
        else:
            patcher = comfy.sd.load_diffusion_model_state_dict(
                tensors, model_options=options, metadata=metadata
            )
    if patcher is None:
        raise unknown_model(path)
    for name, module in patcher.model.diffusion_model.named_modules():
        if vars(module).get("weight", module) is None:
            # ComfyUI builds a quantised layer whose weight is missing, and only logs that.
            raise CheckpointError(f"{path} is refused: it has no weight for {name}. Download the file again.")
    patcher = comfy.model_patcher.ModelPatcher(patcher.model, patcher.load_device, patcher.offload_device)
    return patcher, built


def unknown_model(name: str) -> CheckpointError:
    return CheckpointError(
        f"ComfyUI does not know what model {name} holds. Check that it is a diffusion model and not a LoRA, VAE or "
        f"text encoder; for a new family of models, update ComfyUI."
    )


@contextmanager
def _refusing_damage(path: str) -> Iterator[None]:
    """Turns errors of ComfyUI's loaders about a file, in the `with` block, into CheckpointError. Errors of torch about
    memory and devices pass unchanged."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise CheckpointError(
            f"ComfyUI cannot build a model from {path} ({type(error).__name__}: {str(error)[:300]}). Download the file "
            f"again, or update ComfyUI if it is of a new kind."
        ) from error


def _assigns_weights() -> bool:
    """Returns True if this ComfyUI's loaders can assign tensors as parameters; older ones always copy them."""
    import comfy.model_patcher

    return hasattr(comfy.model_patcher, "CoreModelPatcher")


@contextmanager
def _parameters_assigned() -> Iterator[dict[str, torch.dtype]]:
    """Makes ComfyUI's loaders assign tensors as parameters instead of copying them, in the `with` block, as they do for
    models whose weights are loaded on demand. Yields the dtypes of the last model that was built, by name."""
    import comfy.model_patcher

    built: dict[str, torch.dtype] = {}
    if not _assigns_weights():
        yield built  # it copies them into parameters of its dtypes, once per rank
        return

    class AssigningPatcher(comfy.model_patcher.ModelPatcher):
        def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(model, *args, **kwargs)
            built.clear()
            module = model.diffusion_model
            tensors = (*module.named_parameters(), *module.named_buffers())
            built.update({name: tensor.dtype for name, tensor in tensors})

        def is_dynamic(self) -> bool:
            return True

    stock = comfy.model_patcher.CoreModelPatcher
    comfy.model_patcher.CoreModelPatcher = AssigningPatcher
    try:
        yield built
    finally:
        comfy.model_patcher.CoreModelPatcher = stock
