"""The functions that a pickle calls while a rank reads it, and the rank's own objects that it refers to."""

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
    """A placeholder in a pickle for the RankObjects of the rank that reads it."""


CONTEXT = _Context()
EMPTY_CELL = "parallel: an empty cell"


@dataclass
class RankObjects:
    """The rank's own objects. `resolve`: finds a module or parameter of its model by the name in the pickle;
    `find_module`: finds a Python module by its name in ComfyUI's process; `stored`: finds a tensor by its
    tensors.PlaceInFile; `replaced`: substitutes by the id of the original; `tensors`: those received, by number."""

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
    """Calls the factory `name` of the RankObjects: for a patcher, or the stand-in for ComfyUI's server."""
    return getattr(here, name)()


def find_object(here: RankObjects, module: str, name: str) -> Any:
    """Returns a class or function by its module and qualified name in ComfyUI's process."""
    found: Any = here.find_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return here.replaced.get(id(found), found)


def same(obj: Any) -> Any:
    """Returns `obj`, which is pickled in place of another object."""
    return obj


def make_passing() -> Callable[..., Any]:
    """Returns a wrapper that only calls the next one: a rank has it in place of the wrapper that ships jobs."""
    return lambda executor, *args, **kwargs: executor(*args, **kwargs)


def make_reference(obj: Any) -> Any:
    """Returns a weak reference to `obj`, a dead one for None."""
    return (lambda: None) if obj is None else weakref.ref(obj)


def make_generator(here: RankObjects, on_host: bool, state: Tensor) -> torch.Generator:
    """Returns a random generator in `state`, on the CPU if `on_host`, else on the rank's device."""
    found = torch.Generator(device="cpu" if on_host else here.device)
    found.set_state(state)
    return found


def make_empty(kind: Any) -> Any:
    """Returns an object without attributes; set_attributes adds them."""
    return kind.__new__(kind)


def make_tensor_of(kind: Any, plain: Tensor) -> Tensor:
    """Returns `plain` as a tensor of the subclass `kind`; set_attributes adds its attributes."""
    made: Tensor = plain.as_subclass(kind)
    return made


def set_attributes(obj: Any, state: dict[str, Any]) -> None:
    """Adds the attributes of an object that was made without them."""
    obj.__dict__.update(state)


def make_function(here: RankObjects, name: str, code: types.CodeType, closure: Any) -> types.FunctionType:
    """Returns a function over the globals of the module `name`."""
    return types.FunctionType(code, here.find_module(name).__dict__, None, None, closure)


def fill_function(function: types.FunctionType, state: tuple[Any, Any, Any]) -> None:
    """Sets a function's attributes and fills its cells, which other functions may share."""
    attributes, slots, cells = state
    internals._function_setstate(function, (attributes, slots))
    for cell, content in cells:
        if not (isinstance(content, str) and content == EMPTY_CELL):
            cell.cell_contents = content
