"""Models whose weights a job has beside its own model's: a rank maps their files, and reads what is computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ....errors import CheckpointError, RequestError
from ....requests import ModelSpec
from ....wire.file_identity import FileIdentity, read_identity
from ..load import map_model

MAPPED = "mapped"  # how the word of what lies in such a model begins


class MappedModels:
    """The models of a rank's latest job."""

    def __init__(self) -> None:
        self._bases: dict[tuple[ModelSpec, FileIdentity], nn.Module] = {}
        self._used: set[tuple[ModelSpec, FileIdentity]] = set()

    def find(self, spec: ModelSpec, identity: FileIdentity, kind: str, path: str) -> Any:
        """Finds a module or weight of the model. Raises CheckpointError where the file is another one by now."""
        key = spec, identity
        self._used.add(key)
        if key not in self._bases:
            if read_identity(spec.path) != identity:
                raise CheckpointError(
                    f"{Path(spec.path).name} changed while a job with its weights was sent. Run the prompt again."
                )
            self._bases[key] = map_model(spec).model
        return find_in(self._bases[key], kind, path)

    def forget_unused(self) -> None:
        """Lets go of the models that the job just read has nothing of."""
        self._bases = {key: base for key, base in self._bases.items() if key in self._used}
        self._used.clear()


def find_in(base: nn.Module, kind: str, path: str) -> Any:
    """Finds what a pickle names: a module, parameter or buffer."""
    if kind == "module":
        return base.get_submodule(path)
    if kind != "param":
        raise RequestError(f"A job names {(kind, path)}, which no device has.")
    owner_path, _, name = path.rpartition(".")
    owner = base.get_submodule(owner_path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]
