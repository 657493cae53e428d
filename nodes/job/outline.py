"""A MODEL's network in ComfyUI's process: a tree of modules over the loader's parameters, the names of what the ranks
hold of it, and the changes that nodes made."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import comfy.model_base
import comfy.model_patcher
import torch
from torch import Tensor, nn

from ...parallel_backend.job.changes import (
    HOOKS,
    LOWVRAM,
    MODEL_NOTES,
    NetworkChange,
    SameValues,
    changes_of,
    is_put_back,
    is_same_class,
)
from ...parallel_backend.job.pickling import LOADED_STATE, Known
from ...parallel_backend.job.tensors import Print, differing, print_of, prints_of
from ..host.calls import refusal
from ..model.header_model import build_on_meta
from ..model.unchanged import SameNetwork

_NETWORK = "diffusion_model"
# Attributes that LoRAs put beside the weights of a loaded module.
_FUNCTIONS = ("weight_function", "bias_function")


class CaughtMethod:
    """A stand-in for a method of a module that the ranks hold, or for calling the module if `name` is ""."""

    def __init__(self, encoder: Callable[[], Any], module: nn.Module, path: str, name: str) -> None:
        self._encoder, self._module, self._path, self._name = encoder, weakref.ref(module), path, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoder = self._encoder()
        assert encoder is not None, "its modules live no longer than it does"
        return encoder.call(self._path, self._name, args, kwargs)

    def is_at(self, path: str, name: str) -> bool:
        """Returns False where a node has put it in the place of another method."""
        return (self._path, self._name) == (path, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._module(), self._name))


class Outline:
    """A model as this process has it. `base`: a BaseModel over the loader's parameters; `pristine`: the same model as
    ComfyUI builds it, on the meta device; `known`: what the ranks hold, by id; `prints`: of the loader's parameters and
    buffers."""

    def __init__(
        self,
        source: comfy.model_patcher.ModelPatcher,
        build: Callable[[Any], nn.Module] | None = None,
        copy: Callable[[Any, Known], nn.Module] | None = None,
    ) -> None:
        """First undoes what the last run of any clone of `source` left on the network. `build(model)`: builds the model
        as ranks hold it, by default as a diffusion model; `copy(model, known)`: copies its tree of modules over the
        same parameters."""
        source.unpatch_model(unpatch_weights=False)
        self._backup = source.backup  # the weights before LoRAs were written into them; clones share it
        self.pristine: Any = (build or _pristine)(source.model)
        self.known: Known = {id(source.model): ("base",)}
        self._name(source.model, self.pristine, "")
        self.base: Any = (copy or _shadow_base)(source.model, dict(self.known))
        self._take_unpatched_weights()
        self.known[id(self.base)] = ("base",)
        self._name(self.base, self.pristine, "")
        # Held, so that no other object gets an id in `known`.
        self._source = source.model
        self._held = (
            list(source.model.modules()),
            list(source.model.parameters()),
            list(source.model.buffers()),
        )
        self._built_buffers = {name for name, _ in self.pristine.named_buffers()}
        self._weights = dict(self._named_weights())
        self.prints: dict[str, Print] = prints_of(self._unpatched(self._weights.items()))
        self._others: set[str] = set()  # the loader's parameters that differ from the file's
        self._sent: dict[str, tuple[Print | None, nn.Parameter]] = {}
        self._same: SameNetwork | None = None
        self._changes: list[NetworkChange] = []
        self._same_backup = SameValues([self._backup])

    def _take_unpatched_weights(self) -> None:
        """Takes the loader's parameters where ComfyUI has put patched ones in their place for a run of another MODEL:
        it will put these back, and `base` would still have the patched ones."""
        for key, backup in self._backup.items():
            path, _, name = key.rpartition(".")
            if not backup.inplace_update:
                is_parameter = isinstance(backup.weight, nn.Parameter)
                weight = backup.weight if is_parameter else nn.Parameter(backup.weight, requires_grad=False)
                self.base.get_submodule(path)._parameters[name] = weight

    def changes(self) -> list[NetworkChange]:
        """Finds what nodes have changed in the network, before Parallel Model and since. Raises RequestError for a
        changed weight that only the ranks have."""
        if self._same is None or not self._same_backup.still_hold() or not self._same.still_holds():
            self._changes, weights = self._look_for_changes()
            self._same_backup, self._same = SameValues([self._backup]), SameNetwork(self.base, weights)
        return self._changes

    def _look_for_changes(self) -> tuple[list[NetworkChange], dict[str, Tensor]]:
        """Returns (the changes, the weights by name)."""
        now = dict(self._unpatched(self._named_weights()))
        new = {name for name, value in self._named_weights() if value is not self._weights.get(name)}
        written = differing({name: value for name, value in now.items() if name not in new}, self.prints)
        names = [name for name in self._weights if name in new or name in written or name in self._others]
        sent = [
            NetworkChange(
                "parameter", name.rpartition(".")[0], name.rpartition(".")[2], self._copy(name, now[name])
            )
            for name in names
            if name in now
        ]
        changes = [
            one
            for one in changes_of(self.base, self.pristine, self.known)
            if not (isinstance(one.value, CaughtMethod) and one.value.is_at(one.path, one.name))
        ]
        return [*changes, *sent], now

    def config(self) -> list[NetworkChange]:
        """Returns a change with the plain values of the model's configuration, a dict that nodes change in place;
        none for a model without one."""
        config = getattr(getattr(self._source, "model_config", None), "unet_config", None)
        if not isinstance(config, dict):
            return []
        plain = {
            name: value for name, value in config.items() if isinstance(value, (bool, int, float, str, list))
        }
        return [NetworkChange("config", "", "unet_config", plain)]

    def note_other_weights(self, names: Iterable[str]) -> None:
        """Notes parameters whose values differ in the ranks: a node changed them before Parallel Model."""
        self._others |= set(names)
        self._same = None

    def file_prints(self) -> dict[str, Print]:
        """Returns the prints of parameters that are not known to differ from the file, for the ranks to compare."""
        return {name: mark for name, mark in self.prints.items() if name not in self._others}

    def _copy(self, name: str, value: Tensor) -> nn.Parameter:
        """Returns a copy of `value`: the same one until the values change, so that it is sent once."""
        if value.is_meta:
            raise refusal(f"a node that changes weights of the network, which the devices hold ({name})")
        mark = print_of(value)
        if name not in self._sent or mark is None or self._sent[name][0] != mark:
            self._sent[name] = (mark, nn.Parameter(value.detach().clone(), requires_grad=False))
        return self._sent[name][1]

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and those buffers that ComfyUI builds."""
        yield from self.base.named_parameters()
        yield from ((name, one) for name, one in self.base.named_buffers() if name in self._built_buffers)

    def _unpatched(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, value in parameters:
            yield name, self._backup[name].weight if name in self._backup else value

    def _name(self, module: nn.Module, pristine: nn.Module, path: str) -> None:
        """Names the module in place of `pristine`, or the first of its class in what a node put there, and children."""
        if path and id(module) in self.known:
            return
        if path:
            if not isinstance(module, type(pristine)) and not is_same_class(type(module), type(pristine)):
                inside = next((one for one in module.modules() if isinstance(one, type(pristine))), None)
                if inside is None or id(inside) in self.known:
                    return
                module = inside
            self.known[id(module)] = ("module", path)
            for group in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, group).items():
                    if tensor is not None and name in getattr(pristine, group):
                        self.known.setdefault(id(tensor), ("param", f"{path}.{name}"))
        for name, child in pristine._modules.items():
            own = module._modules.get(name)
            if child is not None and own is not None:
                self._name(own, child, f"{path}.{name}".lstrip("."))


def _pristine(source: comfy.model_base.BaseModel) -> nn.Module:
    """Builds the same model as ComfyUI does, on the meta device."""
    kind = next(kind for kind in type(source).__mro__ if kind.__module__.startswith("comfy."))
    log = logging.getLogger()
    level = log.level
    log.setLevel(logging.ERROR)  # ComfyUI logs about a model that is not loaded
    try:
        built = _built(kind, source)
    finally:
        log.setLevel(level)
    # It has the object of `source`, which a node may have changed in place.
    with contextlib.suppress(TypeError):
        built.latent_format = type(built.latent_format)()
    return built


def _built(kind: type, source: comfy.model_base.BaseModel) -> Any:
    arguments = ((source.model_config,), (source.model_config, source.model_type))
    for given in arguments:
        with contextlib.suppress(TypeError):
            return build_on_meta(lambda device, given=given: kind(*given, device=device))
    return _without_extras(kind, source)


def _without_extras(kind: type, source: comfy.model_base.BaseModel) -> nn.Module:
    """Builds the network and what every BaseModel has. Anything else that the class builds looks like a change, and is
    sent."""
    base: Any = kind.__new__(kind)
    network = next(one for one in type(source.diffusion_model).__mro__ if one.__module__.startswith("comfy."))
    make = comfy.model_base.BaseModel.__init__
    build_on_meta(
        lambda device: make(base, source.model_config, source.model_type, device=device, unet_model=network)
    )
    return base


def _shadow_base(source: comfy.model_base.BaseModel, known: Known) -> comfy.model_base.BaseModel:
    base = type(source).__new__(type(source))
    base.__dict__.update((name, own) for name, own in vars(source).items() if not is_put_back(name, source))
    for group in ("_parameters", "_buffers", "_modules"):
        base.__dict__[group] = dict(source.__dict__[group])
    base._modules[_NETWORK] = shadow_of(source.diffusion_model, known)
    _note_unloaded(base)
    base.current_patcher = None
    return base


def unloaded(model: nn.Module, known: Known | None = None) -> nn.Module:
    """Returns a copy of the tree with the same parameters, as it was before ComfyUI loaded it onto a device. `known`:
    the modules, by id, whose loading to undo; all of them by default."""
    found = shadow_of(model, {id(module): () for module in model.modules()} if known is None else known)
    _note_unloaded(found)
    return found


def _note_unloaded(model: nn.Module) -> None:
    """Has ComfyUI note that it has not loaded the model."""
    for name in MODEL_NOTES:
        model.__dict__.pop(name, None)
    host = torch.device("cpu")
    comfy.model_patcher.ModelPatcher(model, host, host)


def shadow_of(module: nn.Module, known: Known) -> nn.Module:
    """Returns a copy of the tree with the same parameters: stock nodes see what is written into them."""
    return _shadow(module, known, {})


def _shadow(module: nn.Module, known: Known, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    shadow = type(module).__new__(type(module))
    made[id(module)] = shadow
    state = _without_loaded_state(module) if id(module) in known else dict(module.__dict__)
    state.pop("_compiled_call_impl", None)
    for name in HOOKS:
        if name in state:
            state[name] = type(state[name])(state[name])
    state["_modules"] = {
        name: None if child is None else _shadow(child, known, made)
        for name, child in module._modules.items()
    }
    state["_parameters"], state["_buffers"] = dict(module._parameters), dict(module._buffers)
    shadow.__dict__.update(state)
    return shadow


def _without_loaded_state(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes without those that ComfyUI's memory manager and LoRAs put beside its weights, and
    without methods that ComfyUI has put back: they would call the module and not its copy."""
    state = {
        key: value
        for key, value in module.__dict__.items()
        if key not in LOADED_STATE and not key.endswith(LOWVRAM) and not is_put_back(key, module)
    }
    return state | {key: [] for key in _FUNCTIONS if key in state}
