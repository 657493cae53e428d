"""The weights of a model as its file has them, read again where a copy of them would take memory.

A rank on a GPU that puts a LoRA into weights, or gives its device's memory back, keeps no copy of what was there: the
file stays mapped, and the large reads that brought the weights once bring them again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ..staging import StagedReader
from .placing import moved

OpenReader = Callable[[], AbstractContextManager[StagedReader | None]]


class FileWeights:
    """The parameters of a model that are on `device` what they are in the file.

    `model`: ComfyUI's, around the module; `originals`: parameters over the mapped file, by their names in `model`;
    `dtypes`: of those that have another one on the device, by the same names; `open_reader`: reads in large pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        originals: Mapping[str, nn.Parameter],
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        open_reader: OpenReader,
    ) -> None:
        self._model = model
        self._originals = originals
        self._device = device
        self._dtypes = dtypes
        self._open_reader = open_reader
        # Weakly: a parameter that something else has taken the place of gives its memory back.
        self._placed: dict[str, weakref.ref[Tensor]] = {}
        owners = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
        for name, original in originals.items():
            parameter = model.get_parameter(name)
            is_read = parameter is not original and parameter.shape == original.shape
            if is_read and owners[id(parameter)] == 1:  # what several modules share stays one
                self._placed[name] = weakref.ref(parameter)

    def original(self, name: str) -> nn.Parameter | None:
        """Returns the parameter over the file; None where the model's has changed since, or is that one itself."""
        placed = self._placed.get(name)
        is_unchanged = placed is not None and placed() is self._model.get_parameter(name)
        return self._originals[name] if is_unchanged else None

    def is_original(self, name: str, weight: Tensor) -> bool:
        """True if `weight` is the parameter over the file, for which put() has one to put in its place."""
        return name in self._placed and weight is self._originals[name]

    def leave(self) -> None:
        """Has the model hold parameters over the file in place of those that are what the file has."""
        for name in self._placed:
            if (original := self.original(name)) is not None:
                self._set(name, original)

    def come_back(self) -> None:
        """Takes back what leave() did."""
        self.put([name for name in self._placed if self.is_original(name, self._model.get_parameter(name))])

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, names: Iterable[str]) -> None:
        """Reads these parameters from the file once more. What the model had in their place goes first."""
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
