"""Reads a model's weights from its file again, instead of holding a copy of them in memory.

A rank on a GPU that patches a LoRA into weights, or frees its device's memory, makes no copy of the old weights. The
file stays mapped, and the same large reads that loaded the weights load them again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..staging import StagedReader
from .placing import moved

OpenReader = Callable[[], AbstractContextManager[StagedReader | None]]


@dataclass(eq=False)
class FileWeights:
    """The parameters of a model that have the same values on `_device` as in the file.

    `_model`: ComfyUI's BaseModel; `_originals`: parameters over the mapped file, by their names in it; `_dtypes`: the
    dtypes on the device that differ from the file's, by the same names; `_open_reader`: opens a StagedReader.
    """

    _model: nn.Module
    _originals: Mapping[str, nn.Parameter]
    _device: torch.device
    _dtypes: Mapping[str, torch.dtype]
    _open_reader: OpenReader

    def __post_init__(self) -> None:
        # Weak references: a parameter that something else has replaced frees its memory.
        self._placed: dict[str, weakref.ref[Tensor]] = {}
        owners = Counter(id(one) for _, one in self._model.named_parameters(remove_duplicate=False))
        for name, original in self._originals.items():
            parameter = self._model.get_parameter(name)
            is_read = parameter is not original and parameter.shape == original.shape
            if is_read and owners[id(parameter)] == 1:  # not parameters that several modules share
                self._placed[name] = weakref.ref(parameter)

    def original(self, name: str) -> nn.Parameter | None:
        """Returns the parameter over the file; None if the model's was changed since, or is the one over the file."""
        placed = self._placed.get(name)
        is_unchanged = placed is not None and placed() is self._model.get_parameter(name)
        return self._originals[name] if is_unchanged else None

    def is_original(self, name: str, weight: Tensor) -> bool:
        """Returns True if `weight` is the parameter over the file and put() can load it again."""
        return name in self._placed and weight is self._originals[name]

    def leave(self) -> None:
        """Replaces unchanged parameters by those over the file, which frees the device's memory."""
        for name in self._placed:
            if (original := self.original(name)) is not None:
                self._set(name, original)

    def come_back(self) -> None:
        """Undoes leave()."""
        self.put([name for name in self._placed if self.is_original(name, self._model.get_parameter(name))])

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, names: Iterable[str]) -> None:
        """Loads these parameters from the file again. Frees the ones that the model holds before it reads."""
        with self._open_reader() as staged:
            for name in names:
                original = self._originals[name]
                self._set(name, original)
                parameter = moved(original, self._device, self._dtypes.get(name), staged)
                self._set(name, parameter)
                self._placed[name] = weakref.ref(parameter)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(path), own, parameter)
