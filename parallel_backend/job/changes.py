"""Finds what nodes have changed in a network: how its modules differ from those that ComfyUI builds, or from before."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Literal

import numpy
import torch
from torch import nn

from .pickling import LOADED_STATE, Known

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
NESTED = ("_parameters", "_buffers", "_modules", *HOOKS)
_GROUPS = {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl", *HOOKS}
# Attributes in which ComfyUI's memory manager notes where a model's weights lie.
MODEL_NOTES = (
    "current_patcher",
    "current_weight_patches_uuid",
    "dynamic_patchers",
    "dynamic_pins",
    "dynamic_vbars",
    "lowvram_patch_counter",
    "model_loaded_weight_memory",
    "model_lowvram",
    "model_offload_buffer_memory",
)
# Attributes in which ComfyUI's process keeps its own state of a model, and prefixes and a suffix of those on layers.
_NOTES = {"device", "to", "latent_shapes", *MODEL_NOTES, *LOADED_STATE}
_NOTES_BEGIN = (
    "comfy_",
    "prev_comfy",
    "weight_function",
    "bias_function",
    "_backward",
    "_state_dict",
    "_load_state",
)
LOWVRAM = "_lowvram_function"


@dataclass(frozen=True)
class NetworkChange:
    """One change of the module at `path`. `kind`: what has changed; `name`: of the attribute, child or parameter, or of
    the dict of hooks, "" for the class; `value`: the new one. "parameter": or buffer; "config": the values of a dict of
    its model_config."""

    kind: Literal["class", "attribute", "child", "hooks", "parameter", "config"]
    path: str
    name: str
    value: Any


def changes_of(changed: nn.Module, pristine: nn.Module, known: Known) -> Iterator[NetworkChange]:
    """Yields the differences of `changed` from `pristine`, except those of parameters, which the ranks hold. `known`:
    names the modules of `changed` that correspond to one of `pristine`."""
    yield from _Comparison(pristine, known).of_modules(changed, pristine, "")


class _Comparison:
    """A search for the differences of a network from `pristine`. `known`: as in changes_of."""

    def __init__(self, pristine: nn.Module, known: Known) -> None:
        self._known, self._seen = known, set[int]()
        self._paths: dict[int, str] = {}
        for path, module in pristine.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), path)

    def of_modules(self, changed: nn.Module, pristine: nn.Module, path: str) -> Iterator[NetworkChange]:
        """Yields the differences of a module, which lies at `path`, and of those in it."""
        if id(changed) in self._seen:
            return
        self._seen.add(id(changed))
        kinds = type(changed), type(pristine)
        if not is_same_class(*kinds) or _code_of(kinds[0]) != _code_of(kinds[1]):
            yield NetworkChange("class", path, "", type(changed))
        for name, value in changed.__dict__.items():
            if not is_note(name) and self._differs(name, changed, pristine):
                yield NetworkChange("attribute", path, name, value)
        for name in HOOKS:
            if changed.__dict__.get(name):
                yield NetworkChange("hooks", path, name, dict(changed.__dict__[name]))
        for name, child in changed._modules.items():
            before = pristine._modules.get(name)
            if child is None and before is None:
                continue
            if child is None or before is None or not self._is_same_module(child, before):
                yield NetworkChange("child", path, name, child)
            else:
                yield from self.of_modules(child, before, f"{path}.{name}".lstrip("."))

    def _is_same_module(self, module: nn.Module, other: nn.Module) -> bool:
        return self._known.get(id(module)) == ("module", self._paths[id(other)])

    def _differs(self, name: str, changed: nn.Module, pristine: nn.Module) -> bool:
        value = changed.__dict__[name]
        if name in pristine.__dict__:
            if self._is_equal(value, pristine.__dict__[name]):
                return False
        elif value is None:
            return False
        return not is_put_back(name, changed)

    def _is_equal(self, value: Any, other: Any, within: tuple[int, ...] = ()) -> bool:
        """`within`: the ids of the objects that hold `value`."""
        if value is other or id(value) in within:
            return True
        if isinstance(value, type):
            return isinstance(other, type) and is_same_class(value, other)
        if type(value) is not type(other):
            return False
        if isinstance(value, nn.Module):
            # The network itself, or one that is none of its modules, is not compared.
            return not self._paths.get(id(other)) or self._is_same_module(value, other)
        if isinstance(value, torch.device):
            return True
        if isinstance(value, (int, float, str, bool, torch.dtype, set, types.BuiltinFunctionType)):
            return bool(value == other)
        if isinstance(value, torch.Tensor):
            return _is_equal_tensor(value, other)
        if isinstance(value, numpy.ndarray):
            return numpy.array_equal(value, other)
        if isinstance(value, types.FunctionType) and value.__code__ is not other.__code__:
            return False
        if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
            value, other, within = _parts_of(value), _parts_of(other), (*within, id(value))
        if isinstance(value, (list, tuple)):
            return len(value) == len(other) and all(map(self._is_equal, value, other, repeat(within)))
        if isinstance(value, dict):
            return value.keys() == other.keys() and all(
                self._is_equal(value[key], other[key], within) for key in value
            )
        return self._is_equal(fields_of(value), fields_of(other), (*within, id(value)))


def _parts_of(function: Any) -> list[Any]:
    """Returns what decides the result of a function of the same code, a partial or a bound method."""
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__func__, function.__self__]
    return [function.__defaults__, function.__kwdefaults__, *map(_content, function.__closure__ or ())]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the function's maker has not filled it
        return None


def is_note(name: str) -> bool:
    """Returns True for an attribute of a module in which torch or ComfyUI keeps its own state."""
    return name in _GROUPS or name in _NOTES or name.startswith(_NOTES_BEGIN) or name.endswith(LOWVRAM)


def is_put_back(name: str, owner: object) -> bool:
    """Returns True if the attribute is the object's own method, which ComfyUI leaves on it when it removes an object
    patch."""
    value = vars(owner)[name]
    is_own = isinstance(value, types.MethodType) and value.__self__ is owner
    return is_own and value.__func__ is getattr(type(owner), name, None)


def is_same_class(one: type, other: type) -> bool:
    """Returns True if both are one class, or if one function of ComfyUI created both."""
    if one is other:
        return True
    names = [(kind.__module__, kind.__qualname__, kind.__bases__) for kind in (one, other)]
    return names[0] == names[1] and _is_made_by_comfyui(one)


def _is_made_by_comfyui(kind: type) -> bool:
    """Returns True for a class that a function of ComfyUI creates, such as a layer for quantised weights."""
    return kind.__module__.startswith("comfy.") and "<locals>" in kind.__qualname__


def _code_of(kind: type) -> dict[str, Any]:
    """Returns the methods' code and the plain values of a class that a function of ComfyUI creates; {} for others."""
    found = vars(kind) if _is_made_by_comfyui(kind) else {}
    plain = (bool, int, float, str)
    return {
        name: value if isinstance(value, plain) else getattr(value, "__code__", None)
        for name, value in found.items()
    }


def fields_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object, such as a dataclass of settings; None for modules, tensors, functions,
    classes, and what has none."""
    others = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
    return None if isinstance(value, others) else getattr(value, "__dict__", None)


def _is_equal_tensor(value: torch.Tensor, other: torch.Tensor) -> bool:
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if value.is_meta or other.is_meta:
        return True  # the constructor made the one without values
    return value.device == other.device and torch.equal(value, other)


class SameValues:
    """The values of dicts, compared by identity. Holds them, so that no new object gets the id of one."""

    def __init__(self, dicts: Iterable[Mapping[str, Any]]) -> None:
        self._dicts = list(dicts)
        self._values = self._now()

    def still_hold(self) -> bool:
        """Returns True if all dicts still have the same values."""
        return are_same(self._now(), self._values)

    def _now(self) -> list[Any]:
        return list(chain.from_iterable([one.values() for one in self._dicts]))


class SameModules:
    """The classes, attributes, children, hooks and parameters of all modules of ComfyUI's model `base`."""

    def __init__(self, base: nn.Module) -> None:
        modules = list(base.modules())
        nested = [module.__dict__[name] for module in modules for name in NESTED]
        self._kinds = [(module, type(module)) for module in modules]
        self._base, self._base_values = base, _base_attributes(base)
        made = [vars(kind) for kind in {*map(type, modules)} if _is_made_by_comfyui(kind)]
        self._values = SameValues([*(module.__dict__ for module in modules[1:]), *nested, *made])

    def still_hold(self) -> bool:
        """Returns True if none of them has changed."""
        return (
            all(type(module) is kind for module, kind in self._kinds)
            and self._values.still_hold()
            and are_same(_base_attributes(self._base), self._base_values)
        )


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Returns True if both lists have the same objects in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _base_attributes(base: nn.Module) -> list[Any]:
    """Returns the attributes of the model around the network, without the notes that ComfyUI writes at each load."""
    found = [(name, value) for name, value in base.__dict__.items() if not is_note(name)]
    return list(chain.from_iterable(found))
