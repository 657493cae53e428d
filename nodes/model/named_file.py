"""The model that a loader names, read from its file's header for the rules of a strategy before anything runs."""

from __future__ import annotations

import functools
from pathlib import Path

import comfy.model_base
import folder_paths

from ...parallel_backend.errors import CheckpointError, ParallelError
from ...parallel_backend.models.comfyui.model_file import ANY_MODEL
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.models.registry import inspect_model
from ..demo_loader import MODEL as DEMO_MODEL
from ..host.comfyui_flags import comfyui_root
from ..host.prompt_graph import Prompt, source_of, value_of
from ..host.prompt_links import loaders_for
from .class_verdict import known_verdict
from .facts import count_facts
from .files import PARTS, model_path
from .header_model import open_model
from .source import make_spec

# By loader: the input that names the file, and the model folders whose files it offers.
NAMES = {
    "ParallelFluxLoader": ("unet_name", ("diffusion_models",)),
    "ParallelModelLoader": ("model_name", tuple(PARTS)),
    "UNETLoader": ("unet_name", ("diffusion_models",)),
    "CheckpointLoaderSimple": ("ckpt_name", ("checkpoints",)),
}


def read_named(loader: str, name: str, source: str = "") -> ModelFile | None:
    """Returns the model whose file a node of class `loader` names. None if it is no loader or does not offer the file.

    `source`: for Parallel Model, the class of ComfyUI's own loader before it, which names the file. If that loader or
    file is unknown, returns ANY_MODEL. Raises CheckpointError or RequestError for a file that is refused, and OSError.
    """
    if loader == "ParallelDemoLoader":
        return _of_the_first_family(str(DEMO_MODEL))
    is_behind = loader == "ParallelModel"
    kind = source if is_behind else loader
    _, folders = NAMES.get(kind, ("", ()))
    for folder in folders:
        if name in folder_paths.get_filename_list(folder):
            path = model_path(folder, name)
            if kind == "ParallelFluxLoader":
                return _of_the_first_family(path)
            return _counted(path, PARTS[folder])
    return ANY_MODEL if is_behind else None


def files_decided_by(prompt: Prompt, selector: str, *, run: bool = True) -> list[ModelFile]:
    """Lists the models for which a Strategy Selector decides, as far as the prompt tells. `run`: only those whose
    loaders will run. Files that cannot be read are left out: their loaders report that."""
    found = (_file_of(prompt, loader) for loader in loaders_for(prompt, selector, run=run))
    return [file for file in found if file is not None]


def _file_of(prompt: Prompt, loader: str) -> ModelFile | None:
    kind = str(prompt[loader]["class_type"])
    if kind == "ParallelModel":
        source, inputs = source_of(prompt, loader)
        name = inputs.get(NAMES[source][0]) if source in NAMES else None
    else:
        source = ""
        name = value_of(prompt, loader, NAMES[kind][0]) if kind in NAMES else None
    try:
        return read_named(kind, name if isinstance(name, str) else "", source)
    except (ParallelError, OSError):
        return None


def _of_the_first_family(path: str) -> ModelFile:
    """Returns the model as Parallel Flux Loader has it computed. Raises CheckpointError for other files."""
    inspect_model(path)
    return _counted(path, "diffusion_model")


def _counted(path: str, part: str) -> ModelFile:
    make_spec(path, part, {})  # raises for files that ranks do not read
    status = Path(path).stat()
    try:
        model = _opened(path, part, (status.st_mtime_ns, status.st_size))
    except (ParallelError, OSError):
        raise
    except Exception as error:  # ComfyUI's detection may raise anything
        raise CheckpointError(
            f"ComfyUI cannot tell which model {Path(path).name} is ({type(error).__name__}: {error})."
        ) from error
    name = type(model.diffusion_model).__name__
    return count_facts(path, model, known_verdict(comfyui_root(), name))


@functools.lru_cache(maxsize=4)
def _opened(path: str, part: str, stamp: tuple[int, int]) -> comfy.model_base.BaseModel:
    """Caches models on the meta device: to build a large one takes a second. `stamp`: tells if the file changed."""
    return open_model(path, part, {}).model
