"""The weights of models that the ranks hold, for nodes that merge, extract or save them: views of the mapped file.

Nothing of the file is read until a node computes with it, and then this process and the ranks share its pages: the
ranks are told the names of what a job has of it, and map the file themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.errors import CheckpointError
from ...parallel_backend.job.pickling import Known
from ...parallel_backend.models.comfyui.load import map_model
from ...parallel_backend.requests import ModelSpec
from ...parallel_backend.wire.file_identity import FileIdentity, read_identity


class _PlaceInFile(NamedTuple):
    """Where a module or weight of a mapped model lies. `kind`: module or param."""

    spec: ModelSpec
    identity: FileIdentity
    kind: str
    path: str


# What is mapped, as long as anyone has it: patches that a merge has made outlive the MODEL that they are of.
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()


def map_weights(spec: ModelSpec) -> Any:
    """Builds ComfyUI's model over the mapped file. Raises CheckpointError or RequestError."""
    identity = read_identity(spec.path)
    base: Any = map_model(spec).model
    modules: list[tuple[str, nn.Module]] = list(base.named_modules())
    for path, module in modules:
        _places[module] = _PlaceInFile(spec, identity, "module", path)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                _places[tensor] = _PlaceInFile(spec, identity, "param", f"{path}.{name}")
    return base


def is_mapped(tensor: Tensor) -> bool:
    """True for a weight of a model that was mapped here."""
    return tensor in _places


def mapped_words() -> tuple[Known, list[object]]:
    """Returns the words by which ranks find what is mapped, by id, and what they name: held, so that the ids stay
    theirs. Files that changed since are left out: what is mapped of them is sent."""
    places = list(_places.items())
    there = {(place.spec.path, place.identity) for _, place in places}
    same = {(path, identity) for path, identity in there if _is_same(path, identity)}
    held = [(one, place) for one, place in places if (place.spec.path, place.identity) in same]
    return {id(one): ("mapped", *place) for one, place in held}, [one for one, _ in held]


def _is_same(path: str, identity: FileIdentity) -> bool:
    try:
        return read_identity(path) == identity
    except CheckpointError:
        return False
