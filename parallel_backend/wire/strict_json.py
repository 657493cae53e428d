"""Converts frozen dataclasses to JSON and back; an error names the field that deviates from its declared type."""

from __future__ import annotations

import functools
import json
import sys
import types
import typing
from dataclasses import fields, is_dataclass

from ..errors import ParallelError, TransportError

T = typing.TypeVar("T")

# The range of a float; integers must be in it as well.
_LEAST, _MOST = -sys.float_info.max, sys.float_info.max


def parse(text: str) -> object:
    """Parses JSON, but refuses what other parsers read differently: repeated fields, NaN. Raises ValueError."""
    return json.loads(text, object_pairs_hook=without_repeats, parse_constant=_refuse_constant)


def to_json(value: object) -> object:
    """Converts `value` (a dataclass, a tuple of them, or a plain value) to what json.dumps takes."""
    if is_dataclass(value) and not isinstance(value, type):
        types_of = _field_types(type(value))
        return {f.name: _coerced(getattr(value, f.name), types_of[f.name]) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value


def _coerced(value: object, kind: object) -> object:
    # A caller may write cfg=4: a float field must be sent as a float, since the other side accepts nothing else.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return to_json(value)


def from_json(value: object, kind: type[T], where: str) -> T:
    """Reads `value` as `kind`: int, float, str, bool, an optional one, tuple[kind, ...] or a dataclass of those."""
    return typing.cast(T, _read(value, kind, where))  # field types are only known at run time


def _read(value: object, kind: object, where: str) -> object:
    origin, options = _form(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (kind,) = (option for option in options if option is not type(None))
        return _read(value, kind, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise TransportError(f"{where}: expected a list, found {shown(value)}")
        return tuple(_read(item, options[0], where) for item in value)
    assert isinstance(kind, type), f"{where} has a type that JSON cannot carry: {kind}"
    if is_dataclass(kind):
        return _read_dataclass(value, kind, where)
    if type(value) is not kind:  # exact comparison: True is no int, 1 no float
        raise TransportError(f"{where}: expected {kind.__name__}, found {shown(value)}")
    if isinstance(value, (int, float)) and not _LEAST <= value <= _MOST:  # 1e999 reads as infinite
        raise TransportError(f"{where}: {shown(value)} is no number that fits")
    return value


def _read_dataclass(value: object, kind: type, where: str) -> object:
    types_of = _field_types(kind)
    if not isinstance(value, dict) or set(value) != set(types_of):
        raise TransportError(f"{where}: expected the fields {sorted(types_of)}, found {shown(value)}")
    arguments = {name: _read(value[name], of, f"{where}.{name}") for name, of in types_of.items()}
    try:
        return kind(**arguments)
    except ParallelError as error:  # a dataclass that validates itself, such as ParallelStrategy
        raise TransportError(f"{where}: {error}") from None


@functools.cache  # each message of a model call needs about fifty
def _form(kind: object) -> tuple[object, tuple[object, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _field_types(kind: type) -> dict[str, object]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Hook for json.loads: refuses a field that appears twice, which parsers read differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number here")


def shown(value: object) -> str:
    """Returns `value` for an error message, shortened to a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
