"""What a pickled job calls as it is read, and what it is read over: the objects that a rank has itself."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cloudpickle import cloudpickle as internals
from torch import Tensor


class _Context:
    """Stands in a pickle for the RankObjects of the rank that reads it."""


CONTEXT = _Context()
EMPTY_CELL = "parallel: an empty cell"


@dataclass
class RankObjects:
    """What a rank has itself. `resolve`: finds a module or parameter of its model by the word in the pickle;
    `find_module`: a Python module by its name in ComfyUI's process; `stored`: a tensor by its pickling.PlaceInFile;
    `replaced`: objects in place of others, by id; `tensors`: what was sent, by number."""

    device: torch.device
    resolve: Callable[[tuple[Any, ...]], Any]
    find_module: Callable[[str], types.ModuleType]
    local_patcher: Callable[[], Any]
    other_patcher: Callable[[], Any]
    server: Callable[[], Any]
    stored: Callable[..., Tensor]
    replaced: dict[int, Any] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)


def call(here: RankObjects, name: str) -> Any:
    """Makes what the rank makes in its own way: a patcher, the stand-in for ComfyUI's server."""
    return getattr(here, name)()


def find_object(here: RankObjects, module: str, name: str) -> Any:
    """A class or function by where it lies in ComfyUI's process."""
    found: Any = here.find_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return here.replaced.get(id(found), found)


def same(obj: Any) -> Any:
    """What stands for another object: itself."""
    return obj


def make_passing() -> Callable[..., Any]:
    """What stands in a rank for the wrapper that ships jobs."""
    return lambda executor, *args, **kwargs: executor(*args, **kwargs)


def make_reference(obj: Any) -> Any:
    """A weak reference, or one whose object is gone."""
    return (lambda: None) if obj is None else weakref.ref(obj)


def make_generator(here: RankObjects, on_host: bool, state: Tensor) -> torch.Generator:
    """A random generator of the rank's device, in the state of the one in ComfyUI's process."""
    found = torch.Generator(device="cpu" if on_host else here.device)
    found.set_state(state)
    return found


def make_empty(kind: Any) -> Any:
    """An object whose attributes come afterwards."""
    return kind.__new__(kind)


def make_tensor_of(kind: Any, plain: Tensor) -> Tensor:
    """A tensor of a class of its own over the values of `plain`, whose attributes come afterwards."""
    made: Tensor = plain.as_subclass(kind)
    return made


def set_attributes(obj: Any, state: dict[str, Any]) -> None:
    """Fills an object that was made without attributes."""
    obj.__dict__.update(state)


def make_function(here: RankObjects, name: str, code: types.CodeType, closure: Any) -> types.FunctionType:
    """A function over the globals of its module."""
    return types.FunctionType(code, here.find_module(name).__dict__, None, None, closure)


def fill_function(function: types.FunctionType, state: tuple[Any, Any, Any]) -> None:
    """Sets a function's attributes, and the cells that it has: others may share them."""
    attributes, slots, cells = state
    internals._function_setstate(function, (attributes, slots))
    for cell, content in cells:
        if not (isinstance(content, str) and content == EMPTY_CELL):
            cell.cell_contents = content
