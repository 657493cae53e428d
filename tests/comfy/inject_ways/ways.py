"""Ways in which popular packs change what a network computes.

Each mixes positions that are far apart, so a device that computes it over its shard alone gets a different result.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from comfy.k_diffusion import sampling
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection, WrappersMP
from torch import Tensor, nn
from torch.nn import functional

from .places import PLACES, Place

KEY = "ways"
_undo: list[Callable[[], object]] = []


def change(model: ModelPatcher, way: str) -> ModelPatcher:
    """Returns a clone of `model` with the change `way`, the name of a function below that takes a model, its network
    and a place in that."""
    network = model.model.diffusion_model
    names = [kind.__name__ for kind in type(network).__mro__]
    place = next((PLACES[name] for name in names if name in PLACES), None)
    model = model.clone()
    globals()[way](model, network, place)
    return model


def undo_all() -> None:
    while _undo:
        _undo.pop()()


def stirred(x: Tensor) -> Tensor:
    """Returns tokens [B, L, C], or an image or video, with a part of the opposite position added to each position."""
    return x + 0.2 * x.flip(1 if x.ndim == 3 else -1)


class Stirring(nn.Module):
    """A module that returns the stirred result of `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return stirred(self.inner(*args, **kwargs))


def _stirring(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def stirring(*args: Any, **kwargs: Any) -> Tensor:
        return stirred(function(*args, **kwargs))

    return stirring


def _set(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, and registers how to undo it."""
    before = vars(owner).get(name, _undo)

    def back() -> None:
        delattr(owner, name) if before is _undo else setattr(owner, name, before)

    _undo.append(back)
    setattr(owner, name, value)


def method_of_the_network(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    original = getattr(type(network), place.method)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return stirred(original(self, *args, **kwargs))

    _set(network, place.method, types.MethodType(method, network))


def method_of_a_block(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    block = network.get_submodule(place.block)
    _set(block, "forward", _stirring(block.forward))


def method_of_another_module(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Has a module compute with the weights of another one, by the other's unchanged method."""
    module, other = map(network.get_submodule, place.twins)
    _set(module, "forward", other.forward)


def _other_class(module: nn.Module) -> None:
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return stirred(kind.forward(self, *args, **kwargs))

    _undo.append(lambda: setattr(module, "__class__", kind))
    module.__class__ = type(f"Stirred{kind.__name__}", (kind,), {"forward": forward})


def class_of_the_network(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    _other_class(network)


def class_of_a_block(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    _other_class(network.get_submodule(place.block))


def entry_of_a_list(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    path, _, number = place.block.rpartition(".")
    blocks, number = network.get_submodule(path), int(number)
    block = blocks[number]
    _undo.append(lambda: blocks.__setitem__(number, block))
    blocks[number] = Stirring(block)


def child_of_a_block(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    block = network.get_submodule(place.block)
    child = block.get_submodule(place.child)
    _undo.append(lambda: setattr(block, place.child, child))
    setattr(block, place.child, Stirring(child))


def _cooled(original: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return original(q * 0.3, *args, **kwargs)


def attention_of_a_module(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    name, function = place.attention
    module = importlib.import_module(name)
    original = getattr(module, function)

    def cooler(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _cooled(original, q, *args, **kwargs)

    _set(module, function, cooler)


def partial_in_a_module(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Replaces attention by an object whose class and code are not the pack's."""
    module, function = importlib.import_module(place.attention[0]), place.attention[1]
    _set(module, function, functools.partial(_cooled, getattr(module, function)))


def latent_format_in_place(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Changes how latents are scaled, by tensors or a number, in an object that the model's configuration has too."""
    latent_format = model.model.latent_format
    if hasattr(latent_format, "latents_std"):
        _multiply(latent_format.latents_std, 1.3)
    else:
        _set(latent_format, "scale_factor", latent_format.scale_factor * 1.3)


def function_of_torch(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    original = functional.silu

    def shifted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(x + 0.5, *args, **kwargs)

    _set(functional, "silu", shifted)


def _stirring_linear(kind: type[nn.Linear]) -> None:
    original = kind.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        found = original(self, x)
        return stirred(found) if found.ndim == 3 else found

    _set(kind, "forward", forward)


def layer_of_torch(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    _stirring_linear(nn.Linear)


def layer_of_comfyui(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Changes a class within a class of comfy.ops."""
    _stirring_linear(type(network.get_submodule(place.weight.removesuffix(".weight"))))


def method_of_a_class(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    kind = type(network.get_submodule(place.block))
    _set(kind, "forward", _stirring(kind.forward))


def hook_before(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (stirred(args[0]), *args[1:]), kwargs

    block = network.get_submodule(place.block)
    _undo.append(block.register_forward_pre_hook(hook, with_kwargs=True).remove)


def hook_after(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def hook(module: nn.Module, args: tuple, answer: Tensor) -> Tensor:
        return stirred(answer)

    _undo.append(network.get_submodule(place.block).register_forward_hook(hook).remove)


def injection(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def inject(patcher: ModelPatcher) -> None:
        block = patcher.model.diffusion_model.get_submodule(place.block)
        block.forward = _stirring(block.forward)

    def eject(patcher: ModelPatcher) -> None:
        del patcher.model.diffusion_model.get_submodule(place.block).forward

    model.set_injections(KEY, [PatcherInjection(inject, eject)])


def patched_while_it_computes(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def wrapper(apply: Callable[..., Tensor], found: dict) -> Tensor:
        other = _stirring(getattr(network, place.method))
        with mock.patch.object(network, place.method, other):
            return apply(found["input"], found["timestep"], **found["c"])

    model.set_model_unet_function_wrapper(wrapper)


def object_patch_of_a_method(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    name = f"diffusion_model.{place.block}.forward"
    model.add_object_patch(name, _stirring(model.get_model_object(name)))


def object_patch_of_a_child(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    name = f"diffusion_model.{place.block}.{place.child}"
    model.add_object_patch(name, Stirring(model.get_model_object(name)))


def weight_in_place(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    _multiply(network.get_parameter(place.weight).data, 1.3)


def buffers_in_place(model: ModelPatcher, network: nn.Module, _: Place | None) -> None:
    """Changes the buffers of a network, which Flux, Wan and UNets have not."""
    buffers = list(network.buffers())
    assert buffers
    for buffer in buffers:
        _multiply(buffer, 3)


def _multiply(tensor: Tensor, factor: float) -> None:
    before = tensor.clone()
    tensor.mul_(factor)
    _undo.append(lambda: tensor.copy_(before))


def code_of_samplers(model: ModelPatcher, network: nn.Module, _: Place | None) -> None:
    original = sampling.to_d
    _set(sampling, "to_d", lambda *args: 0.8 * original(*args))


def code_of_another_pack(model: ModelPatcher, network: nn.Module, _: Place | None) -> None:
    (models,) = (one for name, one in sys.modules.items() if name.endswith("parallel_test_popular.models"))
    original = models.EmbeddingAttention.__call__
    _set(models.EmbeddingAttention, "__call__", lambda *args: 0.5 * original(*args))


def call_of_a_class(model: ModelPatcher, network: nn.Module, _: Place | None) -> None:
    _set(type(network), "__call__", _stirring(nn.Module.__call__))


def new_parameter(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    path, _, name = place.weight.rpartition(".")
    layer = network.get_submodule(path)
    before = layer.get_parameter(name)
    _undo.append(lambda: setattr(layer, name, before))
    setattr(layer, name, nn.Parameter(before.data.flip(0).clone(), requires_grad=False))


def wrapper_of_a_weight(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def wrapper(weight: Tensor) -> Tensor:
        return 1.3 * weight + 0.1 * weight.flip(0)

    model.add_weight_wrapper(f"diffusion_model.{place.weight}", wrapper)


def number_of_a_module(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    path, _, name = place.number.rpartition(".")
    _set(network.get_submodule(path), name, place.changed_to)


def wrapper_of_the_network(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def wrapper(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return stirred(executor(stirred(x), *args, **kwargs))

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, wrapper)


def wrapper_of_the_model(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def wrapper(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return stirred(executor(x, *args, **kwargs))

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)


def wrapper_of_sampling(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def outer(executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return executor(stirred(noise), *args, **kwargs)

    def inner(executor: Any, guider: Any, sigmas: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return executor(guider, torch.cat([sigmas[:-1] * 0.9, sigmas[-1:]]), *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer)
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, inner)


def attention_override(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def override(original: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(q * 0.3, *args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = override


def attention_by_head(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Overrides attention with one that depends on the number of each head."""

    def override(
        original: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        factors = torch.linspace(0.2, 1.0, heads, dtype=q.dtype)[:, None]
        if kwargs.get("skip_reshape"):
            q = q * factors[:, None]
        else:
            q = (q.unflatten(-1, (heads, -1)) * factors).flatten(-2)
        return original(q, k, v, heads, *args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = override


def attention_with_state(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    """Overrides attention with one that stores a number of all heads, and adds it."""
    stored = {}

    def override(original: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = original(q, *args, **kwargs)
        stored["mean"] = found.abs().mean()
        return found + stored["mean"]

    model.model_options["transformer_options"]["optimized_attention_override"] = override


def patch_of_a_block(model: ModelPatcher, network: nn.Module, place: Place) -> None:
    def replaced(args: dict, extra: dict) -> dict:
        answer = extra["original_block"](args)
        return {**answer, "img": stirred(answer["img"])}

    def queries(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        return stirred(q), k, v

    if place.replaced is not None:
        model.set_model_patch_replace(replaced, "dit", *place.replaced)
    else:
        model.set_model_attn1_patch(queries)
        model.set_model_attn2_output_patch(lambda n, extra: stirred(n))
