"""A model call as ComfyUI makes it, as a ModuleCall: what the module reads, and nothing that is Python's alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping

import torch
from torch import Tensor

from ...parallel_backend.models.comfyui import calls
from ...parallel_backend.models.comfyui.calls import HOST_ONLY, OPTIONS, row_count, without_made
from ...parallel_backend.models.comfyui.patches import ARGUMENT
from ...parallel_backend.models.proof.states import Verdict
from ...parallel_backend.requests import ROWS, ModuleCall
from ...parallel_backend.wire.arguments import Tree
from .options import OWN_OPTIONS
from .patches import CarriedPatches, without_carried
from .unsupported import has_entries, refusal, refuse_effects

_ATTENTION = "ComfyUI's own flags, such as --use-sage-attention, reach the devices"
_LATENT_AND_TIMESTEP = 2  # are positional in every call; the rest goes by name


class ModuleSignature:
    """The arguments of a module class's forward, by which wrappers get them as from the module itself."""

    def __init__(self, own: type) -> None:
        self._signature = inspect.signature(own.forward)
        self._names = [
            name
            for name, parameter in list(self._signature.parameters.items())[1:]
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self._in_place, self._by_name = _handed_to_wrappers(own, self._names)

    def positional(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same call with each argument as the module hands it to wrappers, which may look for it there: in its
        place, or by its name. What it takes for itself goes along by name: it is the ranks' that take it here."""
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        given = tuple(bound.arguments[name] for name in self._in_place)
        rest = {name: value for name, value in kwargs.items() if name not in self._in_place}
        return given, {name: bound.arguments[name] for name in self._by_name} | rest

    def by_name(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same call with all but latent and timestep by name; `args` in their places of `positional`."""
        names = self._in_place[_LATENT_AND_TIMESTEP : len(args)]
        named = dict(zip(names, args[_LATENT_AND_TIMESTEP:], strict=True))
        return args[:_LATENT_AND_TIMESTEP], named | kwargs


def _handed_to_wrappers(own: type, names: list[str]) -> tuple[list[str], list[str]]:
    """Of the arguments that forward names, those that a class hands to wrappers in their places and by their names, as
    its source tells; all in their places where it does not."""
    for kind in own.__mro__:
        forward = vars(kind).get("forward")
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(forward))) if forward else ast.Module([], [])
        except (OSError, TypeError, SyntaxError):
            break
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "execute":
                in_place = [getattr(value, "id", "") for value in call.args]
                by_name = [one.arg for one in call.keywords if one.arg in names]
                return (in_place, by_name) if set(in_place) <= set(names) else (names, [])
    return names, []


def module_call(
    module_class: str, verdict: Verdict, args: tuple, kwargs: Mapping[str, object], patches: CarriedPatches
) -> ModuleCall:
    """The call of a diffusion model's forward: (latent, timestep), the rest by name. `verdict`: on its class. Raises
    RequestError, naming the effect, for what the ranks cannot honour."""
    options = kwargs.get(OPTIONS) or {}
    refuse_model_options(options)
    latent = args[0] if isinstance(args[0], Tensor) else args[0][0]
    described = patches.described(options, latent)
    sent = {
        name: as_tree(without_made(name, value), f"the argument {name!r}")
        for name, value in kwargs.items()
        if name != OPTIONS
    }
    sent[OPTIONS] = options_as_tree(options)
    if described is not None:
        sent[ARGUMENT] = as_tree(described, "a patch of the model")
    return calls.module_call(
        module_class, verdict, tuple(as_tree(value, "the latent or the timestep") for value in args), sent
    )


def options_as_tree(options: Mapping[str, object]) -> dict[str, Tree]:
    """The transformer_options that a module reads. Raises RequestError for an object of Python among them."""
    return {
        key: as_tree(value, f"the model option {key!r}")
        for key, value in options.items()
        if key not in HOST_ONLY | OWN_OPTIONS and not _is_empty(value)
    }


def method_call(method: str, args: tuple, kwargs: Mapping[str, object]) -> ModuleCall:
    """The call of another method of the module, such as one that prepares a prompt."""
    return ModuleCall(
        args=tuple(as_tree(value, f"an argument of {method}") for value in args),
        kwargs={name: as_tree(value, f"the argument {name!r} of {method}") for name, value in kwargs.items()},
        rows=row_count(args[0]),
        tokens=ROWS,
        method=method,
    )


def refuse_model_options(options: dict) -> None:
    """Raises RequestError for transformer_options that change what the module computes by Python of this process."""
    refuse_effects(without_carried(options), {}, attention=_ATTENTION)


def as_tree(value: object, name: str) -> Tree:
    """`value` of plain types only, tensors where they are, and the same ones, by which those that were sent are known.
    Raises RequestError, by `name`, for an object of Python."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(as_tree(item, name) for item in value)
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {key: as_tree(item, name) for key, item in value.items()}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy's
        return value.item()
    raise refusal(f"{name}, which holds a {type(value).__name__}")


def _is_empty(value: object) -> bool:
    return isinstance(value, (dict, list, tuple, set)) and not has_entries(value)
