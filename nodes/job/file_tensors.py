"""Tensors of a job that lie in a file which its prompt names, such as a ControlNet's weights: devices map the file, and
nobody is sent a copy."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import folder_paths
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.errors import CheckpointError
from ...parallel_backend.job.pickling import PlaceInFile
from ...parallel_backend.job.prints import Print, print_of
from ...parallel_backend.wire.file_identity import FileIdentity, read_identity
from ..host.prompt_graph import Prompt, inputs_of, value_of
from ..model.files import is_safetensors

LEAST = 1 << 16  # bytes of a tensor that is looked for, as a LoRA's are; a smaller one is sent


class _Found(NamedTuple):
    place: PlaceInFile
    mark: Print


_found: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor, as long as anyone has it


class FileTensors:
    """The search of one job, in the files that its prompt names."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._opened: dict[str, Any] = {}

    def find(self, tensor: Tensor) -> PlaceInFile | None:
        """Returns where devices find the values of `tensor`; None for one that is small, or lies in no such file."""
        if tensor.nbytes < LEAST or tensor.device.type != "cpu":
            return None
        mark = print_of(tensor)
        if mark is None:
            return None
        known: _Found | None = _found.get(tensor)
        if known is not None and known.mark == mark and self._is_same(known.place):
            return known.place
        _found.pop(tensor, None)
        for path, identity in self._files.items():
            for name in _names_by_print(path, identity).get(mark, ()):
                if self._has_values(path, name, tensor):
                    place = PlaceInFile(path, identity, name)
                    _found[tensor] = _Found(place, mark)
                    return place
        return None

    @functools.cached_property
    def _files(self) -> dict[str, FileIdentity]:
        found = {}
        for path in _named_files(self._prompt):
            try:
                found[path] = read_identity(path)
            except CheckpointError:  # gone since it was loaded
                continue
        return found

    def _has_values(self, path: str, name: str, tensor: Tensor) -> bool:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        stored: Tensor = self._opened[path].get_tensor(name)
        return torch.equal(stored.view(torch.uint8), tensor.detach().view(torch.uint8))

    def _is_same(self, place: PlaceInFile) -> bool:
        """True as long as the file is the one that the tensor was found in. Another prompt may not name it."""
        if place.path not in self._files:
            try:
                self._files[place.path] = read_identity(place.path)
            except CheckpointError:
                return False
        return self._files[place.path] == place.identity


def _named_files(prompt: Prompt) -> Iterator[str]:
    """Yields the paths of the safetensors files that nodes of the prompt name, whichever folder offers them."""
    values = (value_of(prompt, node, name) for node in prompt for name in inputs_of(prompt, node))
    for value in {value for value in values if isinstance(value, str) and is_safetensors(value)}:
        paths = (folder_paths.get_full_path(folder, value) for folder in folder_paths.folder_names_and_paths)
        yield from {str(path) for path in paths if path is not None}


@functools.lru_cache(maxsize=8)
def _names_by_print(path: str, identity: FileIdentity) -> dict[Print, list[str]]:
    """Finds the tensors of a file that are large enough, by a few of their values."""
    names: dict[Print, list[str]] = defaultdict(list)
    try:
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                stored: Tensor = file.get_tensor(name)
                mark = print_of(stored) if stored.nbytes >= LEAST else None
                if mark is not None:
                    names[mark].append(name)
    except (OSError, SafetensorError):  # no such file, whatever it is called
        return {}
    return dict(names)
