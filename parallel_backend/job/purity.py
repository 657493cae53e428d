"""Tells from a function's bytecode whether it is pure: whether it stores nothing outside of what it returns.

A stored value could reach other rows of a call, so ranks may compute rows separately only if nothing is stored.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

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
    "random",
    "randint",
}
_TRUSTED = ("torch", "comfy.", "einops", "math", "builtins", "numpy", "functools", "typing")
_DEEPEST = 4  # nested calls to follow
_known: dict[types.CodeType, bool] = {}


def is_pure(function: Any, depth: int = 0) -> bool:
    """Returns True if neither `function` nor the functions that it calls by name visibly store a value."""
    if isinstance(function, functools.partial):
        return is_pure(function.func, depth)
    if isinstance(function, types.MethodType):
        return is_pure(function.__func__, depth)
    if isinstance(function, types.BuiltinFunctionType):
        return True
    if isinstance(function, type):
        return function.__module__.startswith(_TRUSTED)
    if not isinstance(function, types.FunctionType):
        call = vars(type(function)).get("__call__")
        return isinstance(call, types.FunctionType) and depth < _DEEPEST and is_pure(call, depth + 1)
    if (function.__module__ or "").startswith(_TRUSTED):
        return True
    code = function.__code__
    if code not in _known:
        _known[code] = True  # ends the recursion of a function that calls itself
        followed = depth < _DEEPEST and all(is_pure(other, depth + 1) for other in _called(function))
        _known[code] = followed and _stores_nothing(code)
    return _known[code]


def _stores_nothing(code: types.CodeType) -> bool:
    for step in dis.get_instructions(code):
        if step.opname in _STORES or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
            return False
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR") and str(step.argval) in _CHANGES:
            return False
    return all(_stores_nothing(const) for const in code.co_consts if isinstance(const, types.CodeType))


def _called(function: types.FunctionType) -> Iterator[Any]:
    """Yields what `function` may call: callables in its closure, and functions of its module that it names."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if callable(content) and not isinstance(content, type):
            yield content
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
