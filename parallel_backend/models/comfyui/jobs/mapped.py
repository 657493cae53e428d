"""Files whose weights a job has beside its own model's: a rank maps them, and reads what is computed with."""

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

MAPPED = "mapped"  # how the word of what lies in such a model begins


_Key = tuple[Any, FileIdentity]
PrintOf = Callable[[Tensor], Any]  # another one where a tensor has been written to


class MappedFiles:
    """The files of a rank's latest job beside its own model's: those of models, and those of single tensors."""

    def __init__(self, print_of: PrintOf) -> None:
        self._print_of = print_of
        self._opened: dict[_Key, Any] = {}
        self._used: set[_Key] = set()

    def find(self, spec: ModelSpec, identity: FileIdentity, kind: str, path: str) -> Any:
        """Finds a module or weight of a model. Raises CheckpointError where the file is another one by now."""
        return find_in(self._open(spec, spec.path, identity, lambda: map_model(spec).model), kind, path)

    def find_tensor(self, path: str, identity: FileIdentity, name: str, number: int) -> Tensor:
        """Finds a tensor of a safetensors file, in the file's pages; the same one for each job that names this number.
        Raises CheckpointError as `find` does."""
        opened: _OpenFile = self._open(path, path, identity, lambda: _OpenFile(path, self._print_of))
        return opened.find(name, number)

    def forget_unused(self) -> None:
        """Lets go of the files that the job just read has nothing of."""
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
    """A safetensors file, and what jobs have of it: by name, the tensor, whose it is, and its print before anyone could
    write to it."""

    def __init__(self, path: str, print_of: PrintOf) -> None:
        self._path, self._print_of = path, print_of
        self._file = safe_open(path, "pt")
        self._tensors: dict[str, tuple[Tensor, int, Any]] = {}

    def find(self, name: str, number: int) -> Tensor:
        tensor, whose, mark = self._tensors.get(name, (None, number, None))
        if tensor is not None and whose != number and self._print_of(tensor) != mark:
            self._file = safe_open(self._path, "pt")  # other pages: those have been written to
            tensor = None
        if tensor is None:
            tensor = self._file.get_tensor(name)
            mark = self._print_of(tensor)
        self._tensors[name] = tensor, number, mark
        return tensor


def find_in(base: nn.Module, kind: str, path: str) -> Any:
    """Finds what a pickle names: a module, parameter or buffer."""
    if kind == "module":
        return base.get_submodule(path)
    if kind != "param":
        raise RequestError(f"A job names {(kind, path)}, which no device has.")
    owner_path, _, name = path.rpartition(".")
    owner = base.get_submodule(owner_path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]
