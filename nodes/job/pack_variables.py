"""The variables of packs' modules that a job uses: ranks import the packs anew, and nodes of this process set them."""

from __future__ import annotations

import collections
import functools
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from ...parallel_backend.job.changes import are_same
from ...parallel_backend.job.restore import Replaced, is_as_imported
from .replaced import Packs, classes_of

_MOST = 10_000  # values in one variable that are compared
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_DATA = (str, int, float, dict, list, set, collections.deque, torch.Tensor, torch.Generator, random.Random)
_METHODS = (types.FunctionType, staticmethod, classmethod)
_Owner = types.ModuleType | type
# By (module, class or ""): the variables as the import has set them, each with all that it held then.
_imported: dict[tuple[str, str], dict[str, tuple[Any, list[Any]]]] = {}
_latest: set[tuple[str, str, str]] = set()  # the variables of the last job: module, class or "", name


def note_variables(packs: Packs) -> None:
    """Notes the variables of packs before any node runs: a rank's own import sets them alike."""
    _note(_modules_of(packs), lambda value: True)


def note_late_variables(packs: Packs) -> None:
    """Notes the variables of modules that nodes have imported since then. Nodes may have set data in them already, so
    all of it counts as set."""
    late = {name: module for name, module in _modules_of(packs).items() if (name, "") not in _imported}
    _note(late, lambda value: not _is_data(value))


def _modules_of(packs: Packs) -> dict[str, types.ModuleType]:
    others = packs.keys() - {_pack_of(__name__)}
    return {name: one for name, one in list(sys.modules.items()) if _pack_of(name) in others}


def _note(modules: Mapping[str, types.ModuleType], is_known: Callable[[Any], bool]) -> None:
    _imported.update({(name, ""): {} for name in modules})
    for place, module in modules.items():
        for owner in (module, *classes_of(module)):
            _imported[_key(owner)] = {
                name: (value, _all_in(value))
                for name, value in vars(owner).items()
                if is_known(value) and not _is_of_another_pack(value, place)
            }


def _is_of_another_pack(value: Any, module: str) -> bool:
    """Returns True for code that another pack has put into `module`: a rank that only imports this one has its own."""
    pack = _pack_of(str(value.__module__)) if isinstance(value, (types.FunctionType, type)) else ""
    return os.sep in pack and pack != _pack_of(module)


def variables_of(code: Iterable[Any]) -> list[Replaced]:
    """Returns the variables that `code` names (a job's functions and classes, and all that these name): data, which it
    may change, and whatever was set since the import."""
    found: dict[tuple[str, str, str], Replaced] = {}
    waiting, seen = list(code), set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += _followed(one)
        for owner, names in _named(one):
            for name in names & vars(owner).keys():
                value = vars(owner)[name]
                waiting.append(value)
                variable = Replaced(*_key(owner), name, value)
                if _is_data(value) or was_set(variable):
                    found[variable.module, variable.path, name] = variable
    return list(found.values())


def was_set(variable: Replaced) -> bool:
    """Returns True if a variable is not as the import has set it, or is one of ComfyUI's."""
    noted = _imported.get((variable.module, variable.path))
    if noted is None:
        return True
    before, held = noted.get(variable.name, (None, []))
    return variable.value is not before or not are_same(_all_in(variable.value), held)


def names_of(variables: Iterable[Replaced]) -> set[tuple[str, str, str]]:
    """Returns where the variables are."""
    return {(one.module, one.path, one.name) for one in variables}


def note_latest(variables: Iterable[Replaced]) -> None:
    """Notes the variables of a job."""
    global _latest
    _latest = names_of(variables)


def latest_variables() -> list[Replaced]:
    """Returns those variables as they are now."""
    there = (one for one in sorted(_latest) if one[0] in sys.modules)
    return [Replaced(*one, vars(_owner_of(*one[:2])).get(one[2])) for one in there]


def put_back(variables: Iterable[Replaced]) -> None:
    """Sets variables to the values that a job has given them on the devices."""
    for one in variables:
        owner = _owner_of(one.module, one.path)
        if not is_as_imported(one) and vars(owner).get(one.name) is not one.value:
            setattr(owner, one.name, one.value)


def _pack_of(module: str) -> str:
    folder, separator, name = module.rpartition(os.sep)
    return folder + separator + name.partition(".")[0]


def _key(owner: _Owner) -> tuple[str, str]:
    return (owner.__module__, owner.__qualname__) if isinstance(owner, type) else (owner.__name__, "")


def _owner_of(module: str, path: str) -> Any:
    return functools.reduce(getattr, path.split(".") if path else (), sys.modules[module])


def _is_data(value: Any) -> bool:
    return isinstance(value, _DATA) or (type(value).__module__, "") in _imported


def _all_in(value: Any) -> list[Any]:
    """Returns all values in a container or an object of a pack's class, and in those in it."""
    return list(islice(_held_by(value, set()), _MOST))


def _held_by(value: Any, seen: set[int]) -> Iterator[Any]:
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, _SEQUENCES):
        parts = list(value)
    elif (type(value).__module__, "") in _imported:
        parts = list(getattr(value, "__dict__", {}).values())
    if id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield part
            yield from _held_by(part, seen)


def _followed(one: Any) -> list[Any]:
    """Returns functions and classes whose code runs if that of `one` does."""
    if isinstance(one, (types.MethodType, *_METHODS[1:])):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, functools.partial):
        return [one.func]
    if isinstance(one, type) and _key(one) in _imported:
        return [*vars(one).values(), *one.__bases__]
    kind = type(one)
    return [kind] if _key(kind) in _imported else []


def _named(one: Any) -> Iterator[tuple[_Owner, set[str]]]:
    """Yields modules and classes of packs, with the names that the code of `one` may look up in each, and those of a
    class's methods that were set since the import: any code may call them."""
    if isinstance(one, type) and _key(one) in _imported:
        methods = {name: value for name, value in vars(one).items() if isinstance(value, _METHODS)}
        functions = [getattr(method, "__func__", method) for method in methods.values()]
        imported = _imported[_key(one)]
        replaced = {name for name, value in methods.items() if imported.get(name, (None,))[0] is not value}
        yield one, replaced.union(*(_names_in(function.__code__) for function in functions))
    module = sys.modules.get(str(getattr(one, "__module__", "")))
    if not isinstance(one, types.FunctionType) or module is None or _key(module) not in _imported:
        return
    names = _names_in(one.__code__)
    yield module, names
    for name in names & vars(module).keys():
        value = vars(module)[name]
        if isinstance(value, (types.ModuleType, type)) and _key(value) in _imported:
            yield value, names


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)
