"""Objects of ComfyUI's process as bytes and tensors: what the ranks hold is named, all else is written down.

Goes from ComfyUI to its own children over an inherited socket, and is read nowhere else (unpickling.py).
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch
from cloudpickle import cloudpickle as internals
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import RequestError
from . import reducers
from .reducers import CONTEXT, EMPTY_CELL

# What ComfyUI's memory manager puts beside a loaded module's weights.
LOADED_STATE = ("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "_pin", "_pins", "_pin_state")
# What of a ModelPatcher belongs to the process that it lives in.
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
# The metaclass of what ComfyUI runs a node's `execute` with: a copy of the node's class that cannot be changed.
_LOCKED = "lock_class.<locals>.LockedMeta"
# Objects that an error names on the way to what cannot be written, and the most that are looked through.
_TRAIL, _DEEPEST = 5, 50

# What the ranks hold or map themselves, by id: the word by which reducers.RankObjects finds it.
Known = dict[int, tuple[Any, ...]]


class PlaceInFile(NamedTuple):
    """A tensor of a safetensors file, which ranks map themselves. `identity`: of the file as it was (FileIdentity);
    `number`: of the tensor, whose copy in a rank may have been written to: another one of the same values has another.
    """

    path: str
    identity: Hashable
    name: str
    number: int


FindInFile = Callable[[Tensor], PlaceInFile | None]


class CannotBeSent(RequestError):
    """A job holds what cannot be pickled. `problem`: what and why; `held_by`: the objects on the way to it; `modules`:
    of their code, the closest first."""

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


class SentTensors:
    """The numbers of tensors that the ranks hold already."""

    def __init__(self) -> None:
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (number, version or copy)
        self._next = 0
        self._dropped: list[int] = []

    def number(self, tensor: Tensor) -> tuple[int, bool]:
        """Returns the number of `tensor`, and True if it is new or was written into since."""
        found = self._numbers.get(tensor)
        if found is not None and _is_still(tensor, found[1]):
            return found[0], False
        if found is not None:
            self._dropped.append(found[0])
        self._next += 1
        # Nobody counts what is written into an inference tensor, as prompts are: a copy tells.
        self._numbers[tensor] = (self._next, tensor.clone() if tensor.is_inference() else tensor._version)
        weakref.finalize(tensor, self._forget, self._next)
        return self._next, True

    def _forget(self, number: int) -> None:
        self._dropped.append(number)

    def take_dropped(self) -> list[int]:
        """Returns the numbers that the ranks may forget, once."""
        dropped, self._dropped = sorted(set(self._dropped)), []
        return dropped


@dataclass(frozen=True)
class Pickled:
    """An object as it travels. `tensors`: those that the ranks do not hold yet, by number; `modules`: the names of the
    Python modules that its functions and classes live in."""

    data: bytes
    tensors: dict[str, Tensor]
    modules: frozenset[str]


def pickle_job(
    job: object,
    known: Known,
    sent: SentTensors,
    patcher: type,
    find_in_file: FindInFile | None = None,
) -> Pickled:
    """Writes `job` down. `patcher`: ComfyUI's ModelPatcher; `find_in_file`: tells of a tensor that the ranks can read
    in a file. Raises CannotBeSent."""
    file = io.BytesIO()
    pickler = _JobPickler(file, known, sent, patcher, find_in_file)
    try:
        pickler.dump(job)
    except _CANNOT as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise CannotBeSent(problem, _path_to_it(job, known, patcher)) from error
    finally:
        pickler.forget()
    return Pickled(file.getvalue(), pickler.tensors, frozenset(pickler.modules))


def _path_to_it(job: object, known: Known, patcher: type) -> list[object]:
    """Finds the objects from `job` to the one that cannot be pickled, each of which holds the next."""
    path, seen = [job], {id(job)}
    while len(path) < _DEEPEST:
        for part in _parts(path[-1], known, patcher):
            if id(part) not in seen and not _can_be_sent(part, known, patcher):
                break
        else:
            return path
        path.append(part)
        seen.add(id(part))
    return path


def _can_be_sent(part: object, known: Known, patcher: type) -> bool:
    pickler = _JobPickler(io.BytesIO(), known, SentTensors(), patcher)
    try:
        pickler.dump(part)
    except _CANNOT:
        return False
    finally:
        pickler.forget()
    return True


def _parts(obj: object, known: Known, patcher: type) -> Iterable[object]:
    """What `obj` holds, as far as it travels with it."""
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
        self._alive: list[object] = []  # made on the way: their ids must stay theirs

    def forget(self) -> None:
        """Lets go of all that was written: a MODEL that nobody has any more must not wait for the garbage collector."""
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
        kind_and_place = isinstance(tensor, nn.Parameter), tensor.device.type == "cpu"
        place = None if self._find_in_file is None else self._find_in_file(tensor)
        if place is not None:
            return ("stored", *kind_and_place, *place)
        number, is_new = self._sent.number(tensor)
        if is_new or str(number) in self.tensors:
            self.tensors[str(number)] = tensor
        return ("tensor", *kind_and_place, number)

    def reducer_override(self, obj: Any) -> Any:
        if (bound := _bound_by_super(obj)) is not None:
            return (super, bound)
        if isinstance(obj, (type, types.FunctionType)):
            self.modules.add(obj.__module__ or "")
            if isinstance(obj, type) and type(obj).__qualname__ == _LOCKED:
                return (reducers.same, (obj.__bases__[0],))
            if self._is_of_a_path(obj):
                return (reducers.find_object, (CONTEXT, obj.__module__, obj.__qualname__))
        elif isinstance(obj, self._patcher):
            return self._reduce_patcher(obj)
        elif isinstance(obj, types.CellType):
            return (internals._make_empty_cell, ())  # functions share it, and set its content
        elif isinstance(obj, weakref.ref):
            return (reducers.make_reference, (obj(),))
        elif type(obj).__name__ == "PromptServer":
            return (reducers.call, (CONTEXT, "server"))
        elif isinstance(obj, nn.Module) and type(obj).__reduce_ex__ is object.__reduce_ex__:
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
        """True for what lies in a module that ComfyUI has called by its file's path. pickle takes dots in it for
        packages and finds nothing."""
        module = obj.__module__ or ""
        if os.sep not in module or module.partition(".")[0] in sys.modules:
            return False
        found: Any = sys.modules.get(module)
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is obj

    def _reduce_patcher(self, patcher: Any) -> Any:
        """The job's own is made anew over the model that a rank holds; another travels with its model."""
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
        """A function by value keeps the globals of its module, which a rank has as well, and not copies of them. Its
        cells are set by themselves, since functions share them."""
        name = str(func.__globals__.get("__name__"))
        module = sys.modules.get(name)
        state, slots = internals._function_getstate(func)
        slots["__closure__"] = None
        cells = [(cell, _content(cell)) for cell in func.__closure__ or ()]
        make: Callable[..., Any]
        arguments: tuple[Any, ...]
        if module is None or func.__globals__ is not module.__dict__ or name == "__main__":
            code, new_globals, *_ = self._function_getnewargs(func)
            make, arguments = internals._make_function, (code, new_globals, None, None, func.__closure__)
        else:
            self.modules.add(name)
            slots |= {"__globals__": {}, "_cloudpickle_submodules": []}
            make, arguments = reducers.make_function, (CONTEXT, name, func.__code__, func.__closure__)
        return (make, arguments, (state, slots, cells), None, None, reducers.fill_function)


def _is_opaque(tensor: Tensor) -> bool:
    """True for a tensor of a class of its own that is no quantised one, which goes by its parts."""
    is_quantised = hasattr(tensor, "__tensor_flatten__") or hasattr(type(tensor), "_params")
    return tensor.layout is torch.strided and not is_quantised


def _bound_by_super(obj: Any) -> tuple[type, Any] | None:
    """Returns the class and the object of a kept `super()`; None for anything else. isinstance() takes one for what it
    is bound to."""
    is_super: bool = type(obj) is super
    return (obj.__thisclass__, obj.__self__) if is_super else None


def _is_still(tensor: Tensor, before: int | Tensor) -> bool:
    if isinstance(before, Tensor):
        return before.shape == tensor.shape and before.dtype == tensor.dtype and torch.equal(before, tensor)
    return not tensor.is_inference() and before == tensor._version


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL
