"""Tells from a function's bytecode whether it may be pure: whether each row of its result follows from that row alone.

Ranks may compute rows separately only if no function on the way stores a value, which could reach other rows of a call,
draws random numbers, which would be the same for different rows, or joins all rows into one value. What joins rows in
other ways is found by a trial (rank/work/meeting.py), once for the same code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from .changes import fields_of

_STORES = {
    "STORE_GLOBAL",
    "STORE_ATTR",
    "STORE_SUBSCR",
    "DELETE_SUBSCR",
    "DELETE_ATTR",
    "DELETE_GLOBAL",
    "IMPORT_NAME",
}
_CHANGES = {
    "append",
    "update",
    "setdefault",
    "pop",
    "clear",
    "add",
    "extend",
    "insert",
    "remove",
    "popitem",
    "copy_",
    "add_",
    "mul_",
    "sub_",
    "div_",
    "zero_",
    "fill_",
    "step",
    "register_buffer",
}
_DRAWS = {
    "bernoulli",
    "bernoulli_",
    "choice",
    "dropout",
    "exponential_",
    "gauss",
    "multinomial",
    "normal",
    "normal_",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "random_",
    "randperm",
    "shuffle",
    "uniform",
    "uniform_",
}
# Without further arguments they join all rows. `max` and `min` do as well, but nodes read sigmas with them.
_JOINS = {"mean", "median", "norm", "std", "sum", "var"}
_BUILDS = {"BUILD_LIST", "BUILD_MAP", "BUILD_SET"}
_HIDES = {"eval", "exec"}  # they run code that is not in the bytecode
_METHOD, _GLOBAL = ("LOAD_METHOD", "LOAD_ATTR"), ("LOAD_GLOBAL", "LOAD_NAME")
_TRUSTED = ("torch", "comfy.", "einops", "math", "builtins", "numpy", "functools", "typing")
_MOST = 64  # functions to follow
_DEPTH, _ENTRIES = 4, 1000  # levels of containers and objects to look into for settings, and entries of each
_known = WeakIdKeyDictionary()  # by function or by the object of a method: {code of the method: Purity}


@dataclass(frozen=True)
class Purity:
    """`is_pure`: True if neither a function nor what it calls by name visibly stores a value, draws or joins rows;
    `code`: all this code with its settings: equal for functions that compute alike."""

    is_pure: bool
    code: frozenset[Any]


def purity_of(function: Any) -> Purity:
    """Looks at a function, a method or an object that can be called; once while it is alive."""
    owner = getattr(function, "__self__", function)
    try:
        known = _known.setdefault(owner, {})
    except TypeError:  # it allows no weak reference
        known = {}
    code = getattr(getattr(function, "__func__", None), "__code__", None)
    if code not in known:
        found = set[Any]()
        known[code] = Purity(_is_pure(function, found), frozenset(found))
    purity: Purity = known[code]
    return purity


def is_pure(function: Any) -> bool:
    """Returns True if `function` is pure, as Purity has it."""
    return purity_of(function).is_pure


def _is_pure(function: Any, found: set[Any]) -> bool:
    """Returns True if the function is pure. Adds its code and what it closes over to `found`."""
    waiting: list[Any] = [function]
    seen = set[tuple[int, int]]()
    while waiting:
        one: Any = waiting.pop()
        owner: Any = None
        if isinstance(one, functools.partial):
            found.add(_settings([one.args, one.keywords], _DEPTH))
            waiting.append(one.func)
            continue
        if isinstance(one, types.MethodType):
            one, owner = one.__func__, one.__self__
        elif not isinstance(one, (types.FunctionType, types.BuiltinFunctionType, type)):
            one, owner = vars(type(one)).get("__call__"), one
        if not isinstance(one, (types.FunctionType, types.BuiltinFunctionType, type)):
            return False
        found.add((one.__module__, one.__qualname__))
        if isinstance(one, types.BuiltinFunctionType) or (one.__module__ or "").startswith(_TRUSTED):
            continue
        if isinstance(one, type):
            return False
        place = id(one), id(owner)
        if place not in seen:
            seen.add(place)
            if len(seen) > _MOST or not _is_pure_code(one.__code__):
                return False
            values = [one.__defaults__, one.__kwdefaults__, _closed_over(one), fields_of(owner)]
            found.add((one.__code__, _settings(values, _DEPTH)))
            waiting += _called(one, owner)
    return True


def _settings(value: Any, depth: int) -> Any:
    """Returns the numbers and words in containers and objects, down to `depth` levels, as nested tuples."""
    if isinstance(value, (bool, int, float, str)):
        return type(value), value
    if not depth:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(_settings(one, depth - 1) for one in value[:_ENTRIES])
    named = (value if isinstance(value, Mapping) else fields_of(value)) or {}
    return tuple((name, _settings(one, depth - 1)) for name, one in islice(named.items(), _ENTRIES))


def _closed_over(function: types.FunctionType) -> list[Any]:
    """Returns the contents of a function's cells, None for an empty one."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


@functools.lru_cache(maxsize=4096)
def _is_pure_code(code: types.CodeType) -> bool:
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for number, step in enumerate(steps):
        name = str(step.argval)
        if step.opname in _STORES or (step.opname == "STORE_DEREF" and name in code.co_freevars):
            return False
        if step.opname in _METHOD and name in _DRAWS:
            return False
        if step.opname in _METHOD and name in _CHANGES and not _is_of_a_new_container(code, steps, number):
            return False
        if step.opname in _GLOBAL and name in _HIDES | _DRAWS:
            return False
        if step.opname == "CALL" and _joins_rows(steps[:number], step.arg or 0):
            return False
    return all(_is_pure_code(const) for const in code.co_consts if isinstance(const, types.CodeType))


def _is_of_a_new_container(code: types.CodeType, steps: list[dis.Instruction], number: int) -> bool:
    """Returns True for a method of a local variable that only gets lists, dicts and sets which the code makes: no
    argument, and no value that is one of two."""
    variable = steps[number - 1]
    arguments, *others = inspect.getargs(code)
    if variable.opname != "LOAD_FAST" or variable.argval in (*arguments, *others):
        return False
    return all(
        before.opname in _BUILDS and not step.is_jump_target
        for before, step in pairwise(steps)
        if (step.opname, step.argval) == ("STORE_FAST", variable.argval)
    )


def _joins_rows(before: list[dis.Instruction], arguments: int) -> bool:
    """Returns True for a call `x.mean()` or `torch.mean(x)`. `before`: the steps up to the call."""
    method = before[-1 - arguments :][:1]
    if arguments > 1 or not method or method[0].opname not in _METHOD or method[0].argval not in _JOINS:
        return False
    return arguments == 0 or [one.argval for one in before[-3:-2]] == ["torch"]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns (the names in code and in the functions that it defines, those that it looks up in its module)."""
    names = set(code.co_names)
    in_module = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _GLOBAL}
    for inner in (const for const in code.co_consts if isinstance(const, types.CodeType)):
        names |= _names(inner)[0]
        in_module |= _names(inner)[1]
    return frozenset(names), frozenset(in_module)


def _called(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    """Yields what `function`, a method of `owner` if that is not None, may call: its other methods, callables in its
    closure, methods of objects there, and functions of its module and of modules that it names."""
    names, in_module = _names(function.__code__)
    objects = [] if owner is None else [owner]
    for content in _closed_over(function):
        objects.append(content)
        if callable(content) and not isinstance(content, type):
            yield content
    for one in objects:
        methods = (getattr(type(one), name, None) for name in names)
        yield from (
            types.MethodType(method, one) for method in methods if isinstance(method, types.FunctionType)
        )
    for name in in_module:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, types.ModuleType) and not value.__name__.startswith(_TRUSTED):
            others = (vars(value).get(other) for other in names)
            yield from (other for other in others if isinstance(other, types.FunctionType))
