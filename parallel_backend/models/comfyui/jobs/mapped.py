"""Model files that a job uses besides its own model's file. A rank maps them and reads only what it computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from ....errors import CheckpointError, RequestError
from ....requests import ModelSpec
from ....wire.file_identity import FileIdentity, read_identity
from ..load import map_model

MAPPED = "mapped"  # the first item of a pickle's reference into such a file


_Key = tuple[Any, FileIdentity]
PrintOf = Callable[[Tensor], Any]  # gives a fingerprint, which shows if a tensor was written to


class MappedFiles:
    """The mapped files of a rank's latest job besides its own model's: files of models and of single tensors."""

    def __init__(self, print_of: PrintOf) -> None:
        self._print_of = print_of
        self._opened: dict[_Key, Any] = {}
        self._used: set[_Key] = set()

    def find(self, spec: ModelSpec, identity: FileIdentity, kind: str, path: str) -> Any:
        """Returns a module or weight of a model. Raises CheckpointError if the file has changed."""
        return find_in(self._open(spec, spec.path, identity, lambda: map_model(spec).model), kind, path)

    def find_tensor(self, path: str, identity: FileIdentity, name: str, number: int) -> Tensor:
        """Returns a mapped tensor of a safetensors file; all jobs that give the same `number` get the same tensor.
        Raises CheckpointError if the file has changed."""
        opened: _OpenFile = self._open(path, path, identity, lambda: _OpenFile(path, self._print_of))
        return opened.find(name, number)

    def forget_unused(self) -> None:
        """Closes the files that the latest job does not use."""
        self._opened = {key: one for key, one in self._opened.items() if key in self._used}
        self._used.clear()

    def _open(self, what: Any, path: str, identity: FileIdentity, open_file: Callable[[], Any]) -> Any:
        key = what, identity
        self._used.add(key)
        if key not in self._opened:
            if read_identity(path) != identity:
                raise CheckpointError(
                    f"{Path(path).name} changed while a job with its weights was sent. Run the prompt again."
                )
            self._opened[key] = open_file()
        return self._opened[key]


class _OpenFile:
    """A safetensors file and its tensors that jobs use: by name, the tensor, its number in jobs, and its fingerprint
    from when it was mapped."""

    def __init__(self, path: str, print_of: PrintOf) -> None:
        self._path, self._print_of = path, print_of
        self._file = safe_open(path, "pt")
        self._tensors: dict[str, tuple[Tensor, int, Any]] = {}

    def find(self, name: str, number: int) -> Tensor:
        tensor, whose, mark = self._tensors.get(name, (None, number, None))
        if tensor is not None and whose != number and self._print_of(tensor) != mark:
            self._file = safe_open(self._path, "pt")  # maps new pages: the old ones were written to
            tensor = None
        if tensor is None:
            tensor = self._file.get_tensor(name)
            mark = self._print_of(tensor)
        self._tensors[name] = tensor, number, mark
        return tensor


def find_in(base: nn.Module, kind: str, path: str) -> Any:
    """Returns the module, parameter or buffer that a pickle refers to."""
    if kind == "module":
        return base.get_submodule(path)
    if kind != "param":
        raise RequestError(f"A job names {(kind, path)}, which no device has.")
    owner_path, _, name = path.rpartition(".")
    owner = base.get_submodule(owner_path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]
