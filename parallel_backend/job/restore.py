"""Applies a job's changes to the network in a rank, and undoes them."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .changes import HOOKS, NetworkChange, SameModules, is_note

_DICTS = ("_modules", *HOOKS)
_ABSENT = object()


# In place of the value of a variable that is as the import has set it, in a rank too.
AS_IMPORTED = "parallel: as imported"


@dataclass(frozen=True)
class Replaced:
    """The value that a pack has given to an attribute of a module, ComfyUI's or its own, or of a class in it. `module`:
    the module's name; `path`: of the class, "" for the module itself; `name`: of the attribute; `value`: the value."""

    module: str
    path: str
    name: str
    value: Any


@dataclass(frozen=True)
class AttributesSet:
    """The attributes that a job's code has set on the module at `path`, by name, and the names of those that it has
    removed (`gone`)."""

    path: str
    module: nn.Module
    values: dict[str, Any]
    gone: list[str]


class Original:
    """The state of a model's modules before a job. After `restored`, every module has its earlier class, attributes,
    hooks and children again: what a node stores on the network goes to ComfyUI's process (`attributes_set`), and to
    later jobs from there. Weights, and attributes in which ComfyUI keeps its own state, stay as they are."""

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        self._look()

    def _look(self) -> None:
        self._before = [
            (
                path,
                module,
                type(module),
                dict(module.__dict__),
                {name: dict(module.__dict__[name]) for name in _DICTS},
            )
            for path, module in self._base.named_modules()
        ]
        self._same = SameModules(self._base)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        if not self._same.still_hold():  # a strategy may have added hooks since
            self._look()
        try:
            yield
        finally:
            if not self._same.still_hold():
                self._restore()

    def attributes_set(self, changes: Iterable[NetworkChange]) -> list[AttributesSet]:
        """Returns what code has set on modules within `restored`, in addition to a job's `changes`. What ComfyUI's own
        classes store while they compute is left out: a rank may have computed it from its share of a call."""
        if self._same.still_hold():
            return []
        given = {(one.path, one.name): one.value for one in changes if one.kind == "attribute"}
        stored = dict[type, set[str]]()  # by ComfyUI's methods of a class
        found = []
        for path, module, _, state, _ in self._before:
            values = {
                name: value
                for name, value in module.__dict__.items()
                if value is not given.get((path, name), state.get(name, _ABSENT)) and not is_note(name)
            }
            names = [*state, *(name for owner, name in given if owner == path)]
            gone = [name for name in names if name not in module.__dict__ and not is_note(name)]
            if not values and not gone:
                continue
            kind = type(module)
            if kind not in stored:
                stored[kind] = _stored_by_comfyui(kind)
            values = {name: value for name, value in values.items() if name not in stored[kind]}
            found.append(AttributesSet(path, module, values, gone))
        return found

    def _restore(self) -> None:
        for _, module, kind, state, nested in self._before:
            if type(module) is not kind:
                module.__class__ = kind
            _restore_state(module.__dict__, state, nested)


def _stored_by_comfyui(kind: type) -> set[str]:
    """Returns the names of the attributes that methods of ComfyUI's and torch's classes store after `__init__`."""
    methods = [
        value
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and name != "__init__"
    ]
    theirs = [one for one in methods if (one.__module__ or "").startswith(("comfy.", "torch."))]
    return {
        step.argval for one in theirs for step in dis.get_instructions(one) if step.opname == "STORE_ATTR"
    }


def _restore_state(now: dict[str, Any], state: dict[str, Any], nested: dict[str, dict[str, Any]]) -> None:
    for name in [name for name in now if name not in state and not is_note(name)]:
        del now[name]
    for name, value in state.items():
        if name in nested:
            now[name] = value
            if value != nested[name]:
                value.clear()
                value.update(nested[name])
        elif not is_note(name):
            now[name] = value


def make_changes(
    base: nn.Module,
    changes: Iterable[NetworkChange],
    undo: contextlib.ExitStack,
    prepare: Callable[[type], None],
) -> None:
    """Applies `changes`, inside `Original.restored`. `undo`: gets the reversal of what `restored` does not restore;
    `prepare`: is called with each class that a module gets."""
    for change in changes:
        owner = base.get_submodule(change.path)
        if change.kind == "class":
            prepare(change.value)
            owner.__class__ = change.value
        elif change.kind == "attribute":
            _set(owner.__dict__, change.name, change.value, undo)
        elif change.kind == "child":
            owner._modules[change.name] = change.value
        elif change.kind == "hooks":
            owner.__dict__[change.name].update(change.value)
        elif change.kind == "config":
            config = getattr(owner.model_config, change.name)
            for name, value in change.value.items():
                if name not in config or config[name] != value:
                    _set(config, name, value, undo)
        elif change.name in owner._buffers:
            held = owner._buffers[change.name]
            value = change.value if held is None else change.value.detach().to(held.device)
            _set(owner._buffers, change.name, value, undo)
        else:
            _set(owner._parameters, change.name, change.value, undo)


def _set(values: dict[str, Any], name: str, value: Any, undo: contextlib.ExitStack) -> None:
    if name in values:
        undo.callback(values.__setitem__, name, values[name])
    else:
        undo.callback(values.pop, name, None)
    values[name] = value


def is_as_imported(one: Replaced) -> bool:
    """Returns True for a variable that a rank's import has set already."""
    return isinstance(one.value, str) and one.value == AS_IMPORTED


def set_replaced(
    replaced: Iterable[Replaced], find_module: Callable[[str], Any], undo: contextlib.ExitStack
) -> None:
    """Repeats in this process what packs have set in modules. `undo`: gets the reversal."""
    for one in replaced:
        if is_as_imported(one):
            continue
        owner = functools.reduce(getattr, one.path.split(".") if one.path else (), find_module(one.module))
        if one.name in vars(owner):
            undo.callback(setattr, owner, one.name, vars(owner)[one.name])
        else:
            undo.callback(delattr, owner, one.name)
        setattr(owner, one.name, one.value)
