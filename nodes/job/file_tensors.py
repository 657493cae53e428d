"""Tensors of a job that lie in a file which its prompt names, such as a ControlNet's weights. Devices map the file
instead of receiving a copy."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import folder_paths
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.job.tensors import PlaceInFile, Print, print_of
from ...parallel_backend.wire.file_identity import FileIdentity, find_identity
from ...parallel_backend.wire.transport import NAMES
from ..host.prompt_graph import Prompt, inputs_of, value_of
from ..model.named_file import is_safetensors

LEAST = 1 << 16  # bytes; smaller tensors are sent without a search, while most of a LoRA's are searched for


class _Found(NamedTuple):
    place: PlaceInFile
    mark: Print


_found: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor, as long as it is alive
_numbers = itertools.count()
_Form = tuple[str, tuple[int, ...]]  # dtype, as safetensors names it, and shape


@dataclass
class _Contents:
    """The names of a file's tensors by dtype and shape, from its header, and the prints of those that were read."""

    names: dict[_Form, list[str]]
    prints: dict[str, Print | None] = field(default_factory=dict)


class FileTensors:
    """One job's search in the files that its prompt names, except for that of its own model (`model`, a path)."""

    def __init__(self, prompt: Prompt, model: str) -> None:
        self._prompt, self._model = prompt, model
        self._opened: dict[str, Any] = {}
        self._identities: dict[str, FileIdentity | None] = {}
        self._taken: dict[tuple[str, str], int] = {}  # (path, name): number of its only tensor

    def find(self, tensor: Tensor) -> PlaceInFile | None:
        """Returns the place in a file where devices find the values of `tensor`. None if it is small, lies in no such
        file, or if another tensor of the job has that place: a device may write to its copy."""
        place = self._place_of(tensor)
        if place is None or self._taken.setdefault((place.path, place.name), place.number) != place.number:
            return None
        return place

    def map_into(self, model: nn.Module) -> None:
        """Replaces the weights of `model` that lie in a file by the mapped file's pages, which devices map as well.
        This frees the loader's copy. Later writes to them stay private to this process."""
        for parameter in model.parameters():
            place = self.find(parameter)
            if place is not None:
                parameter.data = self._open(place.path).get_tensor(place.name)

    def _place_of(self, tensor: Tensor) -> PlaceInFile | None:
        if tensor.nbytes < LEAST or tensor.device.type != "cpu":
            return None
        mark = print_of(tensor)
        if mark is None:
            return None
        known: _Found | None = _found.get(tensor)
        if (
            known is not None
            and known.mark == mark
            and self._identity(known.place.path) == known.place.identity
        ):
            return known.place
        _found.pop(tensor, None)
        for path, contents in self._files.items():
            for name in contents.names.get(_form_of(tensor), ()):
                identity = self._identity(path)
                if identity is not None and self._has_values(path, contents, name, tensor, mark):
                    place = PlaceInFile(path, identity, name, next(_numbers))
                    _found[tensor] = _Found(place, mark)
                    return place
        return None

    @functools.cached_property
    def _files(self) -> dict[str, _Contents]:
        found = {}
        for path in _named_files(self._prompt):
            with contextlib.suppress(OSError):  # the file may be gone since it was loaded
                status = Path(path).stat()
                if path != self._model:
                    found[path] = _contents_of(path, (status.st_ino, status.st_size, status.st_mtime_ns))
        return found

    def _identity(self, path: str) -> FileIdentity | None:
        if path not in self._identities:
            self._identities[path] = find_identity(path)
        return self._identities[path]

    def _has_values(self, path: str, contents: _Contents, name: str, tensor: Tensor, mark: Print) -> bool:
        """Returns True if the file's tensor `name` equals `tensor`: compares a few values first, then all."""
        if contents.prints.get(name, mark) != mark:
            return False
        stored: Tensor = self._open(path).get_tensor(name)
        if name not in contents.prints:
            contents.prints[name] = print_of(stored)
        same = contents.prints[name] == mark
        return same and torch.equal(stored.view(torch.uint8), tensor.detach().view(torch.uint8))

    def _open(self, path: str) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]


def _named_files(prompt: Prompt) -> Iterator[str]:
    """Yields the paths, in any of ComfyUI's folders, of the safetensors files that nodes of the prompt name."""
    values = (value_of(prompt, node, name) for node in prompt for name in inputs_of(prompt, node))
    for value in {value for value in values if isinstance(value, str) and is_safetensors(value)}:
        paths = (folder_paths.get_full_path(folder, value) for folder in folder_paths.folder_names_and_paths)
        yield from {str(path) for path in paths if path is not None}


@functools.lru_cache(maxsize=32)
def _contents_of(path: str, stamp: tuple[int, int, int]) -> _Contents:
    """Reads a file's header. `stamp`: (inode, size, mtime in ns); a file with another one is read again."""
    names: dict[_Form, list[str]] = defaultdict(list)
    try:
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                stored = file.get_slice(name)
                names[stored.get_dtype(), tuple(stored.get_shape())].append(name)
    except (OSError, SafetensorError):  # not a safetensors file, despite its name
        return _Contents({})
    return _Contents(dict(names))


def _form_of(tensor: Tensor) -> _Form:
    return NAMES.get(tensor.dtype, ""), tuple(tensor.shape)
