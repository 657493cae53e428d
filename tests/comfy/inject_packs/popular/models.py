"""Nodes that change a model: image embeddings in its attention, closures around blocks, another attention kernel."""

from __future__ import annotations

import threading
from pathlib import Path

import comfy.lora
import folder_paths
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn
from torch.nn import functional

from .node import node


class Projection(nn.Module):
    """The layers of an adapter that make keys and values from an image's embeddings."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.to_k = nn.Linear(width, inner, bias=False)
        self.to_v = nn.Linear(width, inner, bias=False)
        generator = torch.Generator().manual_seed(11)
        for layer in (self.to_k, self.to_v):
            layer.weight = nn.Parameter(
                torch.randn(inner, width, generator=generator) / width**0.5, requires_grad=False
            )


class EmbeddingAttention:
    """A replacement of a cross attention, which adds attention over the embeddings to its result."""

    def __init__(self, projection: Projection, embeddings: Tensor, weight: float) -> None:
        self.projection, self.embeddings, self.weight = projection, embeddings, weight

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict) -> Tensor:
        heads = extra_options["n_heads"]
        seen = self.embeddings.to(q).expand(q.shape[0], -1, -1)
        keys, values = self.projection.to_k(seen), self.projection.to_v(seen)
        added = optimized_attention(q, keys, values, heads)
        return optimized_attention(q, k, v, heads) + self.weight * added


@node("TestEmbeddings", model="MODEL", weight="FLOAT")
def embeddings(model, weight):
    """Adds attention over an image's embeddings to each cross attention of a UNet."""
    model = model.clone()
    drawn = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(12))
    patch = EmbeddingAttention(Projection(64, 320), drawn, weight)
    for place in (("input", 1), ("middle", 0), ("output", 0), ("output", 1)):
        model.set_model_attn2_replace(patch, *place)
    return model


@node("TestBlockClosure", model="MODEL", blocks="STRING", weight="FLOAT")
def block_closure(model, blocks, weight):
    """Puts a closure around each block of a list; the closure shifts all tokens depending on their mean."""
    model = model.clone()
    count = len(model.get_model_object(f"diffusion_model.{blocks}"))
    direction = torch.randn(256, generator=torch.Generator().manual_seed(13))
    calls = {"blocks": 0}
    for number in range(count):
        name = f"diffusion_model.{blocks}.{number}.forward"
        original = model.get_model_object(name)

        def forward(x, *args, original=original, **kwargs):
            calls["blocks"] += 1
            common = original(x, *args, **kwargs)
            steered = torch.tanh(common.mean(1, keepdim=True) * direction.to(common))
            return common + weight * steered

        model.add_object_patch(name, forward)
    return model


def smoothed_attention(
    func, q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **rest
):
    """Attends at another temperature after subtracting the mean of the keys, as quantised kernels do."""
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    if mask is not None and mask.ndim < 4:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    k = k - k.mean(2, keepdim=True)
    answer = functional.scaled_dot_product_attention(q * 0.6, k, v, attn_mask=mask)
    return answer if skip_output_reshape else answer.transpose(1, 2).flatten(2)


@node("TestAttentionKernel", model="MODEL")
def attention_kernel(model):
    """Replaces the model's attention with the pack's kernel."""
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = smoothed_attention
    return model


@node("TestLocks", model="MODEL")
def locks(model):
    """Gives the model's options a lock, which cannot be sent to a rank."""
    model = model.clone()
    model.model_options["transformer_options"]["guarded_by"] = threading.Lock()
    return model


def _with_outputs(model, change):
    model = model.clone()
    model.set_model_output_block_patch(lambda h, skip, options: (change(h), skip))
    return model


@node("TestNoisyOutputs", model="MODEL", weight="FLOAT")
def noisy_outputs(model, weight):
    """Adds random numbers, which differ from row to row, to the output blocks of a UNet."""
    return _with_outputs(model, lambda h: h + weight * torch.randn_like(h))


@node("TestNormedOutputs", model="MODEL")
def normed_outputs(model):
    """Divides the output blocks of a UNet by a norm over all rows of a call."""
    return _with_outputs(model, lambda h: h / h.norm() * h.numel() ** 0.5)


def _to_both(h):
    positive, negative = h.chunk(2)
    return torch.cat((positive + 0.3 * negative, negative))


def _to_the_first_half(h):
    """Assumes that a call has the rows of both prompts."""
    half = len(h) // 2
    return torch.cat((h[:half] * 1.2, h[half:]))


def _of_two_prompts(h):
    first, second = h.chunk(2)
    return torch.cat((first * 1.2, second))


def _from_a_first_row(func, q, k, v, *args, **kwargs):
    """Attends to the keys of a reference row as well, as style alignment does."""
    k = k + 0.3 * k[:1]
    return func(q, k, v, *args, **kwargs)


@node("TestJoinedPrompts", model="MODEL", way="STRING")
def joined_prompts(model, way):
    """Has the rows of one prompt depend on those of the other, or on their place among them: in output blocks of a
    UNet, or in any attention."""
    changes = {
        "halves": _to_both,
        "flip": lambda h: h + 0.3 * h.flip(0),
        "first half": _to_the_first_half,
        "two prompts": _of_two_prompts,
    }
    if way in changes:
        return _with_outputs(model, changes[way])
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = _from_a_first_row
    return model


@node("TestControl", model="MODEL")
def control(model):
    """Gives each call a ControlNet's output, which a UNet takes out of its lists, and a patch besides."""

    def controlled(apply_model, args):
        added = torch.full((len(args["input"]), 1, 1, 1), 0.5)
        return apply_model(args["input"], args["timestep"], **args["c"], control={"middle": [added]})

    model = _with_outputs(model, lambda h: h * 1.1)
    model.set_model_unet_function_wrapper(controlled)
    return model


@node("TestWiderConfiguration", model="MODEL")
def wider_configuration(model):
    """Changes the dict of a model's configuration in place, by which a wrapper scales what the model gives."""
    model = model.clone()
    model.model.model_config.unet_config["in_channels"] = 8

    def scaled(apply_model, args):
        channels = apply_model.__self__.model_config.unet_config["in_channels"]
        return apply_model(args["input"], args["timestep"], **args["c"]) * 4 / channels

    model.set_model_unet_function_wrapper(scaled)
    return model


def _values(q, k, v, heads, *args, **kwargs):
    return v if q.shape == v.shape else optimized_attention(q, k, v, heads, *args, **kwargs)


@node("TestBlockWithoutAttention", model="MODEL", block="INT")
def block_without_attention(model, block):
    """Replaces ComfyUI's attention while one block of a transformer computes; its own attention gives its values."""
    model = model.clone()

    def replaced(args, extra):
        before = attention.optimized_attention
        attention.optimized_attention = _values
        try:
            return extra["original_block"](args)
        finally:
            attention.optimized_attention = before

    model.set_model_patch_replace(replaced, "dit", "double_block", block)
    return model


@node("TestSwitch", model="MODEL", option="STRING")
def switch(model, option):
    """Switches off one of the kinds of attention for which a network has an option."""
    model = model.clone()
    model.model_options["transformer_options"][option] = False
    return model


@node("TestSwitchInBlock", model="MODEL", option="STRING")
def switch_in_block(model, option):
    """Switches off one of the kinds of attention of the first block, by a function around it."""
    model = model.clone()

    def without(args, extra):
        options = {**args["transformer_options"], option: False}
        return extra["original_block"]({**args, "transformer_options": options})

    model.set_model_patch_replace(without, "dit", "double_block", 0)
    return model


_calculate_weight = comfy.lora.calculate_weight


def counted(*args, **kwargs):
    """Calls ComfyUI's function that applies patches to a weight, and writes a line to a file for each call."""
    with (Path(folder_paths.get_output_directory()) / "counted.txt").open("a") as file:
        file.write("called\n")
    return _calculate_weight(*args, **kwargs)


@node("TestCountedPatching", model="MODEL", on="BOOLEAN")
def counted_patching(model, on):
    """Counts how often ComfyUI applies patches to a weight, in all processes, until `on` is false."""
    comfy.lora.calculate_weight = counted if on else _calculate_weight
    return model
