"""The state that a job leaves in its objects for later jobs, such as a node's bank of features or random generators.

A rank runs a job on copies of them. Afterwards the first rank sends back what has changed, and ComfyUI's process stores
it in its own objects. Both know an object by its number in the pickle. What is sent is JSON and tensors, no pickle.
"""

from __future__ import annotations

import collections
import functools
import json
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from .pickling import LOADED_STATE
from .restore import AttributesSet, Replaced, is_as_imported
from .tensors import OF_DEVICES

# Name of the tensor with the changes as JSON; the tensors in them are named alike, with a number behind it.
CHANGES = "changes"
UNSENT = (
    "A later sampling or text may differ from one device: what changed in {names} stays on the devices, as it is "
    "neither plain values nor tensors of at most 256 MiB in all."
)
# Of the tensors in one job's changes. Most of what is larger is the cache of a video's steps, which starts anew.
MOST_BYTES = 2**28
_FIRST_VARIABLE = -1000  # number of a job's first variable
_DEEPEST = 20  # nested containers to follow

# A value as (kind, content, ...): equal for equal values. Only tensors and objects in it are told apart by identity.
_Form = tuple[Any, ...]
_PLAIN = (str, int, float, bool, types.NoneType)
_TENSORS = (Tensor, nn.Parameter)
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, torch.Size)}
_CONTAINERS = (dict, list, set, collections.deque, types.CellType)
# How the state of a random generator is read as JSON, and set.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (
        lambda one: bytes(one.get_state().numpy()).hex(),
        lambda one, state: one.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)),
    ),
    random.Random: (
        lambda one: one.getstate(),
        lambda one, state: one.setstate((state[0], tuple(state[1]), state[2])),
    ),
    numpy.random.RandomState: (
        lambda one: _without_arrays(one.get_state()),
        lambda one, state: one.set_state(tuple(state)),
    ),
    numpy.random.Generator: (
        lambda one: _without_arrays(one.bit_generator.state),
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
}
# Beginnings of the names of Python modules whose objects keep nothing for a node.
_NOT_OF_NODES = (
    "comfy.",
    "torch",
    "builtins",
    "collections",
    "functools",
    "numpy",
    "types",
    "parallel_backend",
)
# Attributes that ComfyUI sets on a guider while it samples, and that torch and ComfyUI set on a module.
_OF_GUIDERS = frozenset({"conds", "inner_model", "loaded_models"})
_OF_MODULES = frozenset({*vars(nn.Module()), *LOADED_STATE})


def global_generators(device: torch.device) -> dict[int, Any]:
    """Returns the random generators of a process, and that of `device` if it is a GPU, by numbers below zero."""
    found = [torch.default_generator, random.getstate.__self__, numpy.random.get_state.__self__]  # type: ignore[attr-defined]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return {-place: one for place, one in enumerate(found, start=1)}


def generator_states(device: torch.device) -> list[Any]:
    """Returns the states of these generators."""
    return [_contents(one)["state"] for one in global_generators(device).values()]


def set_generators(states: Iterable[Any], device: torch.device) -> None:
    """Sets this process's generators, and that of `device`, to states of another process."""
    for one, state in zip(global_generators(device).values(), states, strict=False):  # not all have a GPU
        _store(one, {"state": state}, [])


def variables_by_number(replaced: Sequence[Replaced]) -> dict[int, Any]:
    """Returns the values of variables, by numbers below those of generators."""
    return {_FIRST_VARIABLE - place: one.value for place, one in enumerate(replaced)}


class StateChanges:
    """The changes of the state of a job's objects from now on. `objects`: all in its pickle, variables and generators,
    by number; `attributes`: those that the job sets on modules; `unsent`: objects with a change that `packed` could not
    send; `names`: of their classes or variables, but for code, which each job finds anew."""

    def __init__(self, objects: Mapping[int, Any], attributes: Iterable[Any] = ()) -> None:
        self._numbers = {id(one): number for number, one in objects.items()}
        self._held: list[Any] = [objects]  # so that no new object takes an id
        self._tensors: dict[int, Tensor] = {}  # by id, for the same reason
        roots = (root for one in objects.values() for root in _roots(one))
        tracked = _reached(chain(roots, attributes))
        self._before = [(one, self._state(one)) for one in tracked if id(one) in self._numbers]
        self.unsent: list[Any] = []
        self.names: dict[str, None] = {}

    def packed(self, attributes_set: Iterable[AttributesSet] = ()) -> dict[str, Tensor]:
        """Returns what has changed since as tensors by name, an empty dict if nothing has. `attributes_set`: on modules
        of the network, whose paths serve as their numbers."""
        changes, sent = list[tuple[int | str, list[Any], list[Any]]](), dict[int, Tensor]()
        for one, before in self._before:
            now = self._state(one)
            changed = [(name, form) for name, form in now.items() if before.get(name) != form]
            items = [pair for pair in changed if self._can_be_sent(one, pair, sent)]
            gone = [name for name in before if name not in now and self._can_be_sent(one, (name, name), {})]
            changes.append((self._numbers[id(one)], items, gone))
        for new in attributes_set:
            changed = [(self._form(name), self._form(value)) for name, value in new.values.items()]
            items = [pair for pair in changed if self._can_be_sent(new.module, pair, sent)]
            changes.append((new.path, items, list(map(self._form, new.gone))))
        changes = [(number, items, gone) for number, items, gone in changes if items or gone]
        if not changes:
            return {}
        text = torch.frombuffer(bytearray(json.dumps(changes).encode()), dtype=torch.uint8)
        return {
            CHANGES: text,
            **{f"{CHANGES}.{key}": one.detach().cpu().contiguous() for key, one in sent.items()},
        }

    def _state(self, one: Any) -> dict[_Form, _Form]:
        if type(one) in _GENERATORS:
            return {self._form("state"): ("state", _contents(one)["state"])}
        return {self._form(name): self._form(value) for name, value in _parts(one).items()}

    def _form(self, value: Any, depth: int = 0) -> _Form:
        kind = type(value)
        if kind in _PLAIN:
            return (kind.__name__, value)
        if kind in _TENSORS and value.layout is torch.strided and not value.is_complex():
            self._tensors[id(value)] = value
            version = 0 if value.is_inference() else value._version
            return ("tensor", id(value), version, value.device.type == "cpu")
        if id(value) in self._numbers and not isinstance(value, tuple):
            return ("object", self._numbers[id(value)])
        if kind is torch.device:
            return ("device", value.type)
        if kind is torch.dtype:
            return ("dtype", str(value).removeprefix("torch."))
        if depth < _DEEPEST and (kind is dict or kind is _SEQUENCES.get(kind.__name__)):
            parts = chain.from_iterable(value.items()) if kind is dict else value
            return (kind.__name__, tuple(self._form(one, depth + 1) for one in parts))
        self._held.append(value)
        return ("unsent", id(value), callable(value) or isinstance(value, types.ModuleType))

    def _can_be_sent(self, one: Any, pair: tuple[_Form, _Form], sent: dict[int, Tensor]) -> bool:
        """Returns True if this name and value can be sent, and adds their tensors to `sent`."""
        leaves = [leaf for form in pair for leaf in _leaves(form)]
        unsent = [leaf for leaf in leaves if leaf[0] == "unsent"]
        tensors = {leaf[1]: self._tensors[leaf[1]] for leaf in leaves if leaf[0] == "tensor"}
        fits = sum(tensor.nbytes for tensor in (sent | tensors).values()) <= MOST_BYTES
        if fits and not unsent:
            sent |= tensors
            return True
        self.unsent.append(one)
        if not all(is_code for *_, is_code in unsent) or not fits:
            kind = type(one)
            name = f"{kind.__module__}.{kind.__qualname__}"
            if isinstance(one, Replaced):
                name = f"{one.module}.{one.name}"
            self.names[".".join(name.split(".")[-2:])] = None
        return False


class Variables:
    """The variables that a job has set in a rank's modules (`replaced`, after set_replaced), and those that it uses as
    the import has set them, whose values are noted in `replaced`."""

    def __init__(self, replaced: Iterable[Replaced]) -> None:
        self._owners: list[tuple[Replaced, Any]] = []
        self._imported: list[tuple[Replaced, Any, Any]] = []
        for one in replaced:
            owner: Any = sys.modules.get(one.module)
            for part in one.path.split(".") if one.path else ():
                owner = getattr(owner, part, None)
            if owner is None or one.name not in vars(owner):  # this rank's import has gone another way
                continue
            self._owners.append((one, owner))
            if is_as_imported(one):
                vars(one)["value"] = vars(owner)[one.name]
                self._imported.append((one, owner, one.value))
        self._contents = [(one, _contents(one)) for one in _reached(value for *_, value in self._imported)]

    def note(self) -> None:
        """Notes in `replaced` the values that the job has given to the variables."""
        for one, owner in self._owners:
            vars(one)["value"] = vars(owner).get(one.name)

    def put_back(self, unsent: Iterable[Any]) -> None:
        """Takes back what the job has changed since the import: ComfyUI's process has it, and sends it with later jobs.
        What it does not have, stays. `unsent`: see StateChanges."""
        stay = {id(one) for one in _reached(unsent)}
        for variable, owner, value in self._imported:
            # Not what is still there: a class such as an Enum refuses even that.
            if id(variable) not in stay and vars(owner).get(variable.name) is not value:
                setattr(owner, variable.name, value)
        for one, before in self._contents:
            if id(one) not in stay:
                _store(one, before, [name for name in _contents(one) if name not in before])


def take_changes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Removes what StateChanges has packed from an answer's tensors and returns it."""
    return {name: tensors.pop(name) for name in list(tensors) if name.startswith(CHANGES)}


def store_changes(objects: Mapping[int | str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Stores what StateChanges has packed in the same objects of ComfyUI's process. `objects`: by number; modules, by
    path. Tensors of a rank's device are stored in host memory, and lie on the device again in the next job."""
    if CHANGES not in tensors:
        return
    stored = _Stored(objects, tensors)
    for number, items, gone in json.loads(tensors[CHANGES].numpy().tobytes()):
        values = {stored.value(name): stored.value(form) for name, form in items}
        _store(objects[number], values, [stored.value(name) for name in gone])


class _Stored:
    """Values out of forms, in ComfyUI's process."""

    def __init__(self, objects: Mapping[int | str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._objects, self._tensors = objects, tensors
        self._made: dict[int, Tensor] = {}  # a tensor that two objects hold stays one

    def value(self, form: list[Any]) -> Any:
        kind, content = form[:2]
        if kind == "object":
            return self._objects[content]
        if kind == "tensor":
            if content not in self._made:
                self._made[content] = self._tensors[f"{CHANGES}.{content}"].clone()
                if not form[3]:
                    OF_DEVICES[self._made[content]] = True
            return self._made[content]
        if kind == "device":
            return torch.device(content)
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "dict":
            values = iter(map(self.value, content))
            return dict(zip(values, values, strict=True))
        return _SEQUENCES[kind](map(self.value, content)) if kind in _SEQUENCES else content


def _store(one: Any, values: dict[Any, Any], gone: list[Any]) -> None:
    if type(one) in _GENERATORS:
        _GENERATORS[type(one)][1](one, values["state"])
    elif isinstance(one, types.CellType):
        one.cell_contents = values["content"]
    elif isinstance(one, (list, set, collections.deque)):
        one.clear()
        (one.update if isinstance(one, set) else one.extend)(values["items"])
    else:
        state = one if isinstance(one, dict) else vars(one)
        for name in gone:
            state.pop(name, None)
        state.update(values)


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields generators, objects of packs' classes, packs' functions and containers, as far as these hold others."""
    waiting, seen = list(roots), set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) in _GENERATORS:
            yield one
        elif isinstance(one, tuple):
            waiting += one
        elif isinstance(one, (*_CONTAINERS, Replaced)) or _is_of_a_node(one):
            waiting += _parts(one).values()
            yield one


def _contents(one: Any) -> dict[Any, Any]:
    """Returns a copy of what `_store` needs to set the state of an object again."""
    return {"state": _GENERATORS[type(one)][0](one)} if type(one) in _GENERATORS else dict(_parts(one))


def _roots(one: Any) -> list[Any]:
    """Returns the objects in which `one`, of a job, may keep something for a node."""
    if isinstance(one, functools.partial):
        return [*one.args, *one.keywords.values()]
    if isinstance(one, Replaced) or type(one) in _GENERATORS:
        return [one]
    if not _is_of_a_node(one):
        return []
    if isinstance(one, types.FunctionType):
        return [one, *(one.__closure__ or ()), *(one.__defaults__ or ())]
    return [one]


def _is_of_a_node(one: Any) -> bool:
    """Returns True for an object of a pack's class, and for a pack's function."""
    if isinstance(one, type) or not type(one).__dictoffset__:  # it has no attributes of its own
        return False
    kind = one if isinstance(one, types.FunctionType) else type(one)
    return not (kind.__module__ or "").startswith(_NOT_OF_NODES)


def _parts(one: Any) -> dict[Any, Any]:
    """Returns what an object or a container holds, by name."""
    if isinstance(one, dict):
        return one
    if isinstance(one, types.CellType):
        try:
            return {"content": one.cell_contents}
        except ValueError:
            return {}
    if isinstance(one, (list, set, collections.deque)):
        return {"items": tuple(one)}
    ignored: frozenset[str] = frozenset()
    if isinstance(one, nn.Module):
        ignored = _OF_MODULES
    elif hasattr(type(one), "outer_sample"):
        ignored = _OF_GUIDERS
    return {name: value for name, value in vars(one).items() if name not in ignored}


def _leaves(form: _Form) -> Iterator[_Form]:
    if form[0] == "dict" or form[0] in _SEQUENCES:
        for part in form[1]:
            yield from _leaves(part)
    else:
        yield form


def _without_arrays(state: Any) -> Any:
    """Returns the state of one of numpy's generators as JSON has it."""
    if isinstance(state, dict):
        return {name: _without_arrays(part) for name, part in state.items()}
    return (
        list(map(_without_arrays, state))
        if isinstance(state, tuple)
        else getattr(state, "tolist", lambda: state)()
    )
