"""The weights of models that the ranks hold, for nodes that merge, extract or save them: views of the mapped file.

The file is read only when a node computes with it, and this process then shares its pages with the ranks. A job sends
the ranks only the names of such weights, and they map the file themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.job.pickling import Known
from ...parallel_backend.models.comfyui.load import map_model
from ...parallel_backend.requests import ModelSpec
from ...parallel_backend.wire.file_identity import FileIdentity, find_identity, read_identity


class _PlaceInFile(NamedTuple):
    """The place of a module or weight of a mapped model. `kind`: "module" or "param"; `path`: its dotted name."""

    spec: ModelSpec
    identity: FileIdentity
    kind: str
    path: str


# Places by module or tensor, as long as it is alive: patches that a merge made outlive the MODEL that they came from.
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
    """Returns True for a weight of a model that was mapped here."""
    return tensor in _places


def mapped_words() -> tuple[Known, list[object]]:
    """Returns the words by which ranks find mapped objects, by id, and these objects: hold them, so that no others get
    their ids. Leaves out files that have changed since: their tensors are sent."""
    places = list(_places.items())
    there = {(place.spec.path, place.identity) for _, place in places}
    same = {(path, identity) for path, identity in there if find_identity(path) == identity}
    held = [(one, place) for one, place in places if (place.spec.path, place.identity) in same]
    return {id(one): ("mapped", *place) for one, place in held}, [one for one, _ in held]
