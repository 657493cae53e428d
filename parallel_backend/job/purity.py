"""Tells from a function's bytecode whether it is pure: whether each row of what it returns follows from that row alone.

Ranks may compute rows separately only if no function on the way stores a value, which could reach other rows of a call,
draws random numbers, which would be the same for different rows, or joins all rows into one value.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

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
_HIDES = {"eval", "exec"}  # they run code that is not in the bytecode
_METHOD, _GLOBAL = ("LOAD_METHOD", "LOAD_ATTR"), ("LOAD_GLOBAL", "LOAD_NAME")
_TRUSTED = ("torch", "comfy.", "einops", "math", "builtins", "numpy", "functools", "typing")
_MOST = 64  # functions to follow
_known = WeakIdKeyDictionary()  # by function or by the object of a method: {code of the method: is pure}


def is_pure(function: Any) -> bool:
    """Returns True if neither `function` nor what it calls by name visibly stores a value, draws or joins rows."""
    owner = getattr(function, "__self__", function)
    try:
        known = _known.setdefault(owner, {})
    except TypeError:  # it allows no weak reference
        known = {}
    code = getattr(getattr(function, "__func__", None), "__code__", None)
    if code not in known:
        known[code] = _is_pure(function)
    return bool(known[code])


def _is_pure(function: Any) -> bool:
    waiting: list[Any] = [function]
    seen = set[tuple[int, int]]()
    while waiting:
        one: Any = waiting.pop()
        owner: Any = None
        if isinstance(one, functools.partial):
            waiting.append(one.func)
            continue
        if isinstance(one, types.MethodType):
            one, owner = one.__func__, one.__self__
        elif not isinstance(one, (types.FunctionType, types.BuiltinFunctionType, type)):
            one, owner = vars(type(one)).get("__call__"), one
        if isinstance(one, types.BuiltinFunctionType):
            continue
        if not isinstance(one, (types.FunctionType, type)):
            return False
        if (one.__module__ or "").startswith(_TRUSTED):
            continue
        if isinstance(one, type):
            return False
        place = id(one), id(owner)
        if place not in seen:
            seen.add(place)
            if len(seen) > _MOST or not _is_pure_code(one.__code__):
                return False
            waiting += _called(one, owner)
    return True


@functools.lru_cache(maxsize=4096)
def _is_pure_code(code: types.CodeType) -> bool:
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for number, step in enumerate(steps):
        name = str(step.argval)
        if step.opname in _STORES or (step.opname == "STORE_DEREF" and name in code.co_freevars):
            return False
        if step.opname in _METHOD and name in _CHANGES | _DRAWS:
            return False
        if step.opname in _GLOBAL and name in _HIDES | _DRAWS:
            return False
        if step.opname == "CALL" and _joins_rows(steps[:number], step.arg or 0):
            return False
    return all(_is_pure_code(const) for const in code.co_consts if isinstance(const, types.CodeType))


def _joins_rows(before: list[dis.Instruction], arguments: int) -> bool:
    """Returns True for a call `x.mean()` or `torch.mean(x)`. `before`: the steps up to the call."""
    method = before[-1 - arguments :][:1]
    if arguments > 1 or not method or method[0].opname not in _METHOD or method[0].argval not in _JOINS:
        return False
    return arguments == 0 or [one.argval for one in before[-3:-2]] == ["torch"]


def _called(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    """Yields what `function`, a method of `owner` if that is not None, may call: its other methods, callables in its
    closure, methods of objects there, and functions of its module and of modules that it names."""
    names = function.__code__.co_names
    objects = [] if owner is None else [owner]
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        objects.append(content)
        if callable(content) and not isinstance(content, type):
            yield content
    for one in objects:
        methods = (getattr(type(one), name, None) for name in names)
        yield from (
            types.MethodType(method, one) for method in methods if isinstance(method, types.FunctionType)
        )
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, types.ModuleType) and not value.__name__.startswith(_TRUSTED):
            others = (vars(value).get(other) for other in names)
            yield from (other for other in others if isinstance(other, types.FunctionType))
