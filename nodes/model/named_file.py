"""The model file that a loader node names or a MODEL was loaded from: how ComfyUI reads it, and its header's facts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_patcher
import comfy.sd
import folder_paths
import torch

from ...parallel_backend.errors import CheckpointError, ParallelError, RequestError
from ...parallel_backend.models.comfyui.model_file import ANY_MODEL
from ...parallel_backend.models.gguf_file import SUFFIX, is_gguf
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.models.registry import check_family
from ...parallel_backend.requests import FP8_FAST, ComfyUISource, ModelSpec
from ..host.comfyui_flags import comfyui_root, numeric_flags
from ..host.prompt_graph import Prompt, class_of, inputs_of, loader_before, value_of
from ..host.prompt_links import current_node, loaders_for
from .class_verdict import known_verdict
from .facts import count_facts
from .header_model import open_model

Options = Mapping[str, Any]  # ComfyUI's model_options
_SUFFIXES = (".safetensors", ".sft")
# ComfyUI lists no GGUF files, so the pack registers a model folder for them. It shares the list object of paths, and so
# includes paths that are added later.
GGUF_FOLDER = "parallel_gguf"
folder_paths.folder_names_and_paths[GGUF_FOLDER] = (
    folder_paths.folder_names_and_paths["diffusion_models"][0],
    {SUFFIX},
)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model" / "transformer.safetensors"
# The part that ComfyUI loads from the files of each model folder (ComfyUISource.part).
PARTS = {
    "diffusion_models": "diffusion_model",
    "checkpoints": "checkpoint",
    GGUF_FOLDER: "diffusion_model",
}
_LOADERS = "Load Diffusion Model or Load Checkpoint, or (also .gguf files) Parallel Model Loader"
_FP8 = {"dtype": torch.float8_e4m3fn}
_FP8_FAST = {**_FP8, "fp8_optimizations": True}


def is_safetensors(name: str) -> bool:
    """Returns True if the name ends in .safetensors or .sft, in upper or lower case, as in ComfyUI's lists."""
    return Path(name).suffix.lower() in _SUFFIXES


def model_names(*folders: str) -> list[str]:
    """Lists the names of the model files that the devices can read, without duplicates."""
    names = (name for folder in folders for name in folder_paths.get_filename_list(folder))
    return list(dict.fromkeys(name for name in names if is_safetensors(name) or is_gguf(name)))


def model_path(folder: str, name: str) -> str:
    """Returns the path of the file. Raises CheckpointError if there is no such file (any more)."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise CheckpointError(
            f"There is no file behind {name}: it was moved or removed, or it is a link to one that is not there. Put "
            f"the file back, or choose another one."
        )
    return str(path)


def facts_of(spec: ModelSpec) -> ModelFile:
    """Returns what planning needs of a file, from its header. Raises CheckpointError or OSError."""
    model = outline_of(spec)
    name = type(model.diffusion_model).__name__
    return count_facts(spec.path, model, known_verdict(comfyui_root(), name))


def outline_of(spec: ModelSpec) -> comfy.model_base.BaseModel:
    """Returns a file's model on the meta device. Raises as `facts_of`."""
    status = Path(spec.path).stat()
    try:
        return _opened(spec, (status.st_mtime_ns, status.st_size))
    except (ParallelError, OSError):
        raise
    except Exception as error:  # ComfyUI's detection may raise anything
        raise CheckpointError(
            f"ComfyUI cannot tell which model {Path(spec.path).name} is ({type(error).__name__}: {error})."
        ) from error


@functools.lru_cache(maxsize=4)
def _opened(spec: ModelSpec, stamp: tuple[int, int]) -> comfy.model_base.BaseModel:
    """Caches models on the meta device: to build a large one takes a second. `stamp`: tells if the file changed."""
    return open_model(spec).model


@dataclass(frozen=True)
class FileLoader:
    """A loader node that names a file of `folders` by its input `input`. `options`: for each of its weight_dtypes, the
    default first; `family`: the only one of registry.py that it takes, "" for any."""

    input: str
    folders: tuple[str, ...]
    options: Mapping[str, Options]
    family: str = ""

    def folder_of(self, name: str) -> str | None:
        """Returns the first of its folders that has the file, None if none has it."""
        return next((one for one in self.folders if name in folder_paths.get_filename_list(one)), None)

    def find(self, name: str, weight_dtype: object) -> ModelSpec:
        """Returns the spec of the file that it reads. Raises CheckpointError if it is gone, RequestError for another
        dtype, and either for a file that is refused."""
        if weight_dtype not in self.options:
            known = ", ".join(self.options)
            raise RequestError(f"weight_dtype is {weight_dtype!r}; it must be one of {known}.")
        folder = self.folder_of(name) or self.folders[-1]
        path = model_path(folder, name)
        if self.family:
            check_family(path, self.family)
        return make_spec(path, PARTS[folder], self.options[str(weight_dtype)])


# The weight_dtypes of ComfyUI's Load Diffusion Model.
_STOCK_OPTIONS: dict[str, Options] = {
    "default": {},
    "fp8_e4m3fn": _FP8,
    "fp8_e4m3fn_fast": _FP8_FAST,
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
_OTHER_OPTIONS: dict[str, Options] = {
    "auto": {},
    **{name: {"dtype": getattr(torch, name)} for name in ("bfloat16", "float16", "float32")},
    "float8_e4m3fn": _FP8,
    FP8_FAST: _FP8_FAST,
}
# ComfyUI's own loaders, before Parallel Model.
STOCK_LOADERS = {
    "UNETLoader": FileLoader("unet_name", ("diffusion_models",), _STOCK_OPTIONS),
    "CheckpointLoaderSimple": FileLoader("ckpt_name", ("checkpoints",), _STOCK_OPTIONS),
}
FILE_LOADERS = {
    "ParallelFluxLoader": FileLoader(
        "unet_name", ("diffusion_models", GGUF_FOLDER), _OTHER_OPTIONS, family="flux"
    ),
    "ParallelModelLoader": FileLoader("model_name", tuple(PARTS), _STOCK_OPTIONS),
    **STOCK_LOADERS,
}


def find_spec(patcher: comfy.model_patcher.ModelPatcher) -> ModelSpec:
    """Returns a MODEL's file and how it was read, as ComfyUI's loaders note it, or as another pack's loader in the
    running prompt names it. Raises RequestError if neither tells it, or as `make_spec`."""
    noted = getattr(patcher, "cached_patcher_init", None)
    load, arguments = (None, ()) if noted is None else noted[:2]
    if load is comfy.sd.load_diffusion_model:
        return make_spec(arguments[0], "diffusion_model", arguments[1] if len(arguments) > 1 else {})
    if load is comfy.sd.load_checkpoint_guess_config and noted[2:] == (0,):
        return make_spec(arguments[0], "checkpoint", arguments[6] if len(arguments) > 6 else {})
    if (found := _spec_by_prompt(patcher)) is not None:
        return found
    if noted is None:
        raise RequestError(
            f"This MODEL does not say which file it was loaded from, so the devices cannot load it too: its loader is "
            f"none of ComfyUI's own, or this ComfyUI is too old to note it. Load the file with {_LOADERS}."
        )
    name = f"{getattr(load, '__module__', '?')}.{getattr(load, '__qualname__', load)}"
    raise RequestError(
        f"This MODEL was loaded by {name}, which the devices do not know. Load the file with {_LOADERS}."
    )


def make_spec(path: str, part: str, options: Options) -> ModelSpec:
    """Returns the spec of a file that ComfyUI loads as `part` (ComfyUISource) with these model_options. Raises
    RequestError for formats and options that the devices do not support."""
    if not (is_safetensors(path) or is_gguf(path)):
        raise RequestError(
            f"{Path(path).name} is no .safetensors or .gguf file, and the devices read no other: a .ckpt or .pt can "
            f"run code. Save it as .safetensors (ModelSave or CheckpointSave), or use another file."
        )
    if is_gguf(path) and options:
        raise RequestError(
            f"{Path(path).name} has formats of its own (GGUF); set weight_dtype to default or auto, or choose a "
            f".safetensors file."
        )
    if options.get("custom_operations") is not None:
        raise RequestError(
            f"{Path(path).name} was loaded with layers of another node pack (such as NF4), which the devices do not "
            f"have. Load the file with {_LOADERS}."
        )
    dtype = options.get("dtype", options.get("weight_dtype"))
    return ModelSpec(
        path=str(path),
        family="comfyui",
        weight_dtype="auto" if dtype is None else str(dtype).removeprefix("torch."),
        comfyui=ComfyUISource(
            root=comfyui_root(),
            flags=numeric_flags(),
            part=part,
            fp8_matmul=bool(options.get("fp8_optimizations", False)),
        ),
    )


def demo_spec() -> ModelSpec:
    """Returns the spec of the demo model."""
    return make_spec(str(DEMO_MODEL), "diffusion_model", {})


def _spec_by_prompt(patcher: comfy.model_patcher.ModelPatcher) -> ModelSpec | None:
    """Returns the file of a MODEL if its loader in the running prompt names just one. None otherwise, and for models
    with layers of another pack. Ranks compare the file's weights with the MODEL's, and get those that differ."""
    here, config = current_node(), patcher.model.model_config
    if here is None or config.custom_operations is not None:
        return None
    loader = loader_before(*here)
    if class_of(here[0], loader) in FILE_LOADERS:  # they note it: a node has made this MODEL of others
        return None
    names = [value for value in inputs_of(here[0], loader).values() if isinstance(value, str)]
    found = {
        (path, part)
        for name in names
        for folder, part in PARTS.items()
        if (path := folder_paths.get_full_path(folder, name)) is not None
    }
    if len(found) != 1 or is_gguf(next(iter(found))[0]):
        return None
    (file,), options = found, dict[str, Any]()
    outline = outline_of(make_spec(*file, {}))
    if outline.state_dict().keys() != patcher.model.state_dict().keys():
        return None  # the loader has read another file too
    if patcher.model.get_dtype() != outline.get_dtype():
        options["dtype"] = patcher.model.get_dtype()
    if config.optimizations.get("fp8"):
        options["fp8_optimizations"] = True
    return make_spec(*file, options)


def read_named(loader: str, name: str, source: str = "") -> ModelFile | None:
    """Returns the model whose file a node of class `loader` names. None if it is no loader or does not offer the file.

    `source`: for Parallel Model, the class of ComfyUI's own loader before it, which names the file. If that loader or
    file is unknown, returns ANY_MODEL. Raises CheckpointError or RequestError for a file that is refused, and OSError.
    """
    if loader == "ParallelDemoLoader":
        return facts_of(demo_spec())
    found = FILE_LOADERS.get(source if loader == "ParallelModel" else loader)
    if found is not None and found.folder_of(name) is not None:
        return facts_of(found.find(name, next(iter(found.options))))
    return ANY_MODEL if loader == "ParallelModel" else None


def files_decided_by(prompt: Prompt, selector: str, *, run: bool = True) -> list[ModelFile]:
    """Lists the models for which a Strategy Selector decides, as far as the prompt tells. `run`: only those whose
    loaders will run. Files that cannot be read are left out: their loaders report that."""
    found = (_file_of(prompt, loader) for loader in loaders_for(prompt, selector, run=run))
    return [file for file in found if file is not None]


def _file_of(prompt: Prompt, loader: str) -> ModelFile | None:
    kind = class_of(prompt, loader)
    node = loader_before(prompt, loader) if kind == "ParallelModel" else loader
    source = class_of(prompt, node)
    name = value_of(prompt, node, FILE_LOADERS[source].input) if source in FILE_LOADERS else ""
    try:
        return read_named(kind, str(name), source)
    except (ParallelError, OSError):
        return None
