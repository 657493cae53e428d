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


class MappedFiles:
    """The files of a rank's latest job beside its own model's: those of models, and those of single tensors."""

    def __init__(self) -> None:
        self._opened: dict[_Key, Any] = {}
        self._used: set[_Key] = set()

    def find(self, spec: ModelSpec, identity: FileIdentity, kind: str, path: str) -> Any:
        """Finds a module or weight of a model. Raises CheckpointError where the file is another one by now."""
        return find_in(self._open(spec, spec.path, identity, lambda: map_model(spec).model), kind, path)

    def find_tensor(self, path: str, identity: FileIdentity, name: str) -> Tensor:
        """Finds a tensor of a safetensors file, in the file's pages; the same one for each job. Raises CheckpointError
        as `find` does."""
        file, tensors = self._open(path, path, identity, lambda: (safe_open(path, "pt"), {}))
        if name not in tensors:
            tensors[name] = file.get_tensor(name)
        tensor: Tensor = tensors[name]
        return tensor

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


def find_in(base: nn.Module, kind: str, path: str) -> Any:
    """Finds what a pickle names: a module, parameter or buffer."""
    if kind == "module":
        return base.get_submodule(path)
    if kind != "param":
        raise RequestError(f"A job names {(kind, path)}, which no device has.")
    owner_path, _, name = path.rpartition(".")
    owner = base.get_submodule(owner_path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]
