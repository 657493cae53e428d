"""Pickles objects of ComfyUI's process into bytes and tensors; objects that the ranks hold are only named.

Only ranks read these pickles (unpickling.py): ComfyUI's own child processes, or those of a cluster that it heads.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as internals
from torch import Tensor, nn

from ..errors import RequestError
from . import reducers
from .reducers import CONTEXT, EMPTY_CELL
from .tensors import OF_DEVICES, FindInFile, SentTensors

# Attributes that ComfyUI's memory manager sets on a loaded module.
LOADED_STATE = ("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "_pin", "_pins", "_pin_state")
# Attributes of a ModelPatcher that are only valid in its own process.
PATCHER_STATE = (
    "model",
    "backup",
    "backup_buffers",
    "object_patches_backup",
    "pinned",
    "parent",
    "load_device",
    "offload_device",
    "size",
    "hook_backup",
    "cached_patcher_init",
    "non_dynamic_delegate_model",
    "job_model",
    "encoder",
    "made_by",
    "made_from",
)
_PLAIN = frozenset({dict, str, int, float, tuple, list, bool, bytes, type(None)})
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_CANNOT = (TypeError, pickle.PicklingError, RuntimeError, AttributeError, NotImplementedError, ValueError)
# The metaclass of the locked copy of a node's class on which ComfyUI calls `execute`.
_LOCKED = "lock_class.<locals>.LockedMeta"
_FUNCTION_SLOTS = ("__annotations__", "__kwdefaults__", "__defaults__", "__module__", "__doc__")
# An error names at most _TRAIL objects on the way to the one that cannot be pickled; the search stops at _DEEPEST.
_TRAIL, _DEEPEST = 5, 50

# The objects that the ranks hold or map themselves: by id, the name that RankObjects.resolve looks up.
Known = dict[int, tuple[Any, ...]]


class CannotBeSent(RequestError):
    """Raised for a job with an object that cannot be pickled. `problem`: the object and the reason; `held_by`: the
    objects through which the job holds it; `modules`: the Python modules of these, starting at the object."""

    def __init__(self, problem: str, path: Sequence[object]) -> None:
        named = [one for one in path if type(one) not in _PLAIN]
        names = (
            f"{type(one).__module__}.{getattr(one, '__qualname__', type(one).__qualname__)}" for one in named
        )
        self.problem, self.held_by = problem, " > ".join(list(names)[-_TRAIL:])
        self.modules = tuple(str(getattr(one, "__module__", "")) for one in reversed(named))
        super().__init__(
            f"The devices cannot be given this job: {problem}. It is held by {self.held_by}; take the node out that "
            f"puts it there, or connect its MODEL without Parallel Model."
        )


@dataclass(frozen=True)
class Pickled:
    """A pickled object. `tensors`: those that the ranks do not hold yet, by number; `modules`: the names of the Python
    modules that define its functions and classes; `code`: these; `objects`: those that it consists of, by the number
    that unpickling gives them too."""

    data: bytes
    tensors: dict[str, Tensor]
    modules: frozenset[str]
    code: list[Any]
    objects: dict[int, Any]


def pickle_job(
    job: object,
    known: Known,
    sent: SentTensors,
    patcher: type,
    find_in_file: FindInFile | None = None,
) -> Pickled:
    """Pickles `job`. `patcher`: ComfyUI's class ModelPatcher; `find_in_file`: returns the place of a tensor that the
    ranks can read from a file. Raises CannotBeSent."""
    file = io.BytesIO()
    pickler = _JobPickler(file, known, sent, patcher, find_in_file)
    try:
        pickler.dump(job)
        objects = dict(pickler.memo.copy().values())
    except _CANNOT as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise CannotBeSent(problem, _path_to_it(job, known, patcher)) from error
    finally:
        pickler.forget()
    return Pickled(file.getvalue(), pickler.tensors, frozenset(pickler.modules), pickler.code, objects)


def _path_to_it(job: object, known: Known, patcher: type) -> list[object]:
    """Returns the objects from `job` to the one that cannot be pickled; each holds the next."""
    path, seen = [job], {id(job)}
    while len(path) < _DEEPEST:
        for part in _parts(path[-1], known, patcher):
            if id(part) not in seen and not can_be_sent(part, known, patcher):
                break
        else:
            return path
        path.append(part)
        seen.add(id(part))
    return path


def can_be_sent(part: object, known: Known, patcher: type) -> bool:
    """Returns True if pickle_job can pickle `part`."""
    pickler = _JobPickler(io.BytesIO(), known, SentTensors(), patcher)
    try:
        pickler.dump(part)
    except _CANNOT:
        return False
    finally:
        pickler.forget()
    return True


def _parts(obj: object, known: Known, patcher: type) -> Iterable[object]:
    """Returns the objects that are pickled with `obj`."""
    if id(obj) in known or isinstance(obj, (Tensor, type, types.ModuleType)):
        return ()
    if isinstance(obj, dict):
        return [*obj.values(), *obj.keys()]
    if isinstance(obj, (list, tuple, set, frozenset)):
        return obj
    if isinstance(obj, types.MethodType):
        return obj.__self__, obj.__func__
    if (bound := _bound_by_super(obj)) is not None:
        return bound
    if isinstance(obj, functools.partial):
        return obj.func, obj.args, obj.keywords
    if isinstance(obj, types.FunctionType):
        cells = [_content(cell) for cell in obj.__closure__ or ()]
        return [*cells, *(obj.__defaults__ or ()), *vars(obj).values()]
    state = getattr(obj, "__dict__", {})
    if isinstance(obj, patcher):
        return [value for key, value in state.items() if key not in PATCHER_STATE]
    return list(state.values())


class _JobPickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        known: Known,
        sent: SentTensors,
        patcher: type,
        find_in_file: FindInFile | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self._known, self._sent, self._patcher = known, sent, patcher
        self._find_in_file = find_in_file
        self.tensors: dict[str, Tensor] = {}
        self.modules: set[str] = set()
        self.code: list[Any] = []
        self._alive: list[object] = []  # objects created while pickling: no other object may get their ids

    def forget(self) -> None:
        """Drops all references to pickled objects, so that an unused MODEL does not wait for the garbage collector."""
        self.clear_memo()
        self._alive, self._known = [], {}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return None
        found = self._known.get(id(obj))
        if found is not None:
            return found
        if isinstance(obj, Tensor):
            return self._tensor(obj)
        if obj is CONTEXT:
            return ("context",)
        if kind is torch.device:
            return ("device", obj.type == "cpu", str(obj))
        if kind is types.ModuleType:
            self.modules.add(obj.__name__)
        return None

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.is_meta:
            raise RuntimeError(f"a tensor made of weights that lie on the devices ({list(tensor.shape)})")
        kind = type(tensor)
        is_plain = kind in _TENSORS
        if tensor.layout is not torch.strided or not is_plain:
            return None
        on_host = tensor.device.type == "cpu" and tensor not in OF_DEVICES
        kind_and_place = isinstance(tensor, nn.Parameter), on_host
        number = self._sent.find(tensor)
        if number is None:
            place = None if self._find_in_file is None else self._find_in_file(tensor)
            if place is not None:
                return ("stored", *kind_and_place, *place)
            number = self._sent.add(tensor)
            self.tensors[str(number)] = tensor
        return ("tensor", *kind_and_place, number)

    def reducer_override(self, obj: Any) -> Any:
        if (bound := _bound_by_super(obj)) is not None:
            return (super, bound)
        if isinstance(obj, (type, types.FunctionType)):
            self.modules.add(obj.__module__ or "")
            self.code.append(obj)
            if isinstance(obj, type) and type(obj).__qualname__ == _LOCKED:
                return (reducers.same, (obj.__bases__[0],))
            if self._is_of_a_path(obj):
                return (reducers.find_object, (CONTEXT, obj.__module__, obj.__qualname__))
        elif isinstance(obj, self._patcher):
            return self._reduce_patcher(obj)
        elif isinstance(obj, types.CellType):
            return (internals._make_empty_cell, ())  # shared by functions; fill_function fills it
        elif isinstance(obj, weakref.ref):
            return (reducers.make_reference, (obj(),))
        elif type(obj).__name__ == "PromptServer":
            return (reducers.call, (CONTEXT, "server"))
        elif (isinstance(obj, nn.Module) or _looks_itself_up(type(obj))) and _is_plain(type(obj)):
            state = {key: value for key, value in obj.__dict__.items() if key not in LOADED_STATE}
            return (reducers.make_empty, (type(obj),), state, None, None, reducers.set_attributes)
        elif isinstance(obj, Tensor) and type(obj) not in _TENSORS and _is_opaque(obj):
            plain = obj.as_subclass(Tensor)
            self._alive.append(plain)
            return (
                reducers.make_tensor_of,
                (type(obj), plain),
                vars(obj),
                None,
                None,
                reducers.set_attributes,
            )
        elif isinstance(obj, torch.Generator):
            return (reducers.make_generator, (CONTEXT, obj.device.type == "cpu", obj.get_state()))
        return super().reducer_override(obj)

    def _is_of_a_path(self, obj: Any) -> bool:
        """Returns True for an object of a module that ComfyUI has named by its file path. pickle reads the dots in that
        name as packages and does not find the object."""
        module = obj.__module__ or ""
        if os.sep not in module or module.partition(".")[0] in sys.modules:
            return False
        found: Any = sys.modules.get(module)
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is obj

    def _reduce_patcher(self, patcher: Any) -> Any:
        """Pickles a ModelPatcher: the job's own without its model, which the ranks hold; any other with its model."""
        if id(patcher.model) in self._known:
            state = {key: value for key, value in vars(patcher).items() if key not in PATCHER_STATE}
            return (
                reducers.call,
                (CONTEXT, "local_patcher"),
                state,
                None,
                None,
                reducers.set_attributes,
            )
        if patcher.is_dynamic():
            patcher = patcher.clone(disable_dynamic=True)
            self._alive.append(patcher)
        state = {key: value for key, value in vars(patcher).items() if key not in PATCHER_STATE}
        state["model"] = patcher.model
        for name in ("backup", "object_patches_backup", "hook_backup"):
            state[name] = dict(getattr(patcher, name))
        return (reducers.call, (CONTEXT, "other_patcher"), state, None, None, reducers.set_attributes)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """Pickles a function by value, but with a reference to its module's globals, which a rank has too, instead of
        copies. The contents of its cells are set separately, since functions share cells."""
        name = str(func.__globals__.get("__name__"))
        module = sys.modules.get(name)
        cells = [(cell, _content(cell)) for cell in func.__closure__ or ()]
        make: Callable[..., Any]
        arguments: tuple[Any, ...]
        if module is None or func.__globals__ is not module.__dict__ or name == "__main__":
            state, slots = internals._function_getstate(func)
            code, new_globals, *_ = self._function_getnewargs(func)
            make, arguments = internals._make_function, (code, new_globals, None, None, func.__closure__)
        else:
            self.modules.add(name)
            state, slots = _attributes_of(func)
            make, arguments = reducers.make_function, (CONTEXT, name, func.__code__, func.__closure__)
        slots["__closure__"] = None
        return (make, arguments, (state, slots, cells), None, None, reducers.fill_function)


def _attributes_of(func: types.FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what cloudpickle's _function_getstate returns, without globals and the modules that they lead to:
    cloudpickle searches all imported modules for those, in milliseconds."""
    # As there: a copy of each name, since an interned string would make equal functions differ as bytes.
    names = {name: "".join(getattr(func, name)) for name in ("__name__", "__qualname__")}
    slots = {name: getattr(func, name) for name in _FUNCTION_SLOTS}
    state = {"".join(name): value for name, value in func.__dict__.items()}
    return state, {**names, **slots, "__globals__": {}, "_cloudpickle_submodules": []}


def _is_plain(kind: type) -> bool:
    """Returns True if pickle stores the attributes of an object of this class and nothing else."""
    return not {"__reduce__", "__reduce_ex__"} & _names_of(kind)


def _looks_itself_up(kind: type) -> bool:
    """Returns True for a class that finds missing attributes by others. pickle asks an object that has none yet for
    `__setstate__`, and such a `__getattr__` would call itself without end."""
    if not isinstance(getattr(kind, "__getattr__", None), types.FunctionType):
        return False
    return kind.__dictoffset__ != 0 and not {"__new__", "__setstate__", "__getstate__"} & _names_of(kind)


def _names_of(kind: type) -> set[str]:
    return {name for one in kind.__mro__[:-1] for name in vars(one)}


def _is_opaque(tensor: Tensor) -> bool:
    """Returns True unless `tensor` is sparse or quantised; quantised ones are pickled by their parts."""
    is_quantised = hasattr(tensor, "__tensor_flatten__") or hasattr(type(tensor), "_params")
    return tensor.layout is torch.strided and not is_quantised


def _bound_by_super(obj: Any) -> tuple[type, Any] | None:
    """Returns the class and the object of a stored `super()`, None for any other object. isinstance() would see the
    bound object instead."""
    is_super: bool = type(obj) is super
    return (obj.__thisclass__, obj.__self__) if is_super else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL
