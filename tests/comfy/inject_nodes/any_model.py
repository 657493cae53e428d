"""Nodes for models of any family: they make latents, prompts and changed models."""

from __future__ import annotations

import json
from types import SimpleNamespace

import comfy.sd
import comfy.utils
import folder_paths
import gguf
import torch
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

from .node import node


def _drawn(size: list[int] | torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _sides(shape: str) -> list[int]:
    return [int(side) for side in shape.split(",")]


@node("UnetLoaderGGUF")
def load_gguf(unet_name: str, virtual_vram: int) -> io.Model:
    """Stands for another pack's loader: the model that it returns does not say which file it is of."""
    reader, weights = gguf.GGUFReader(folder_paths.get_full_path("diffusion_models", unet_name)), {}
    for tensor in reader.tensors:
        weights[tensor.name] = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        shape = reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}")
        if shape is not None:
            weights[tensor.name] = weights[tensor.name].reshape(shape.contents())
    return comfy.sd.load_diffusion_model_state_dict(weights)


@node("TestShapedLatent")
def shaped_latent(shape: str, draw: int) -> io.Latent:
    """Returns a LATENT of `shape`, such as 1,16,3,8,8; with ; between several shapes, one in several parts. `draw`: the
    seed of its values; a negative one gives zeros."""
    generator = torch.Generator().manual_seed(abs(draw))
    sizes = map(_sides, shape.split(";"))
    parts = [torch.randn(size, generator=generator) * (draw >= 0) for size in sizes]
    return {"samples": parts[0] if len(parts) == 1 else NestedTensor(parts)}


@node("TestFirstFrameKept")
def first_frame_kept(latent: io.Latent) -> io.Latent:
    """Returns a video LATENT whose mask keeps a drawn first frame, as Wan22ImageToVideoLatent does."""
    samples = latent["samples"]
    mask = torch.ones(1, 1, *samples.shape[2:])
    mask[:, :, 0] = 0
    first = _drawn(samples[:, :, :1].shape, 32)
    return {"samples": torch.cat([first, samples[:, :, 1:]], 2), "noise_mask": mask}


def _with(conditioning: list, **extras: object) -> list:
    """Returns the prompt with `extras` added."""
    ((context, extra),) = conditioning
    return [[context, {**extra, **extras}]]


@node("TestVideoStart")
def video_start(conditioning: io.Conditioning, latent: io.Latent) -> io.Conditioning:
    """Adds the first image of a video to a prompt, as WanImageToVideo does."""
    mask = torch.ones_like(latent["samples"])[:, :4]
    mask[:, :, :1] = 0
    seen = SimpleNamespace(penultimate_hidden_states=_drawn([1, 5, 1280], 3))
    return _with(
        conditioning, concat_latent_image=latent["samples"], concat_mask=mask, clip_vision_output=seen
    )


@node("TestKeyframe")
def keyframe(conditioning: io.Conditioning, latent: io.Latent) -> io.Conditioning:
    """Adds the first frame of a video to a prompt, as MiniMaxH3ImageToVideo does."""
    frame = {"resolved_frame_index": 0, "latent": latent["samples"]}
    return _with(conditioning, minimax_keyframes=[frame], minimax_frame_count=5)


@node("TestTextMask")
def text_mask(conditioning: io.Conditioning, padding: int) -> io.Conditioning:
    """Marks the last `padding` tokens of a prompt as padding, as text encoders with a mask do. With 0, marks the prompt
    as one that the model's own layers still have to prepare."""
    if not padding:
        return _with(conditioning, unprocessed_ltxav_embeds=True)
    mask = torch.ones(conditioning[0][0].shape[:2], dtype=torch.long)
    mask[:, -padding:] = 0
    return _with(conditioning, attention_mask=mask)


@node("TestPromptExtra")
def prompt_extra(conditioning: io.Conditioning, name: str, shape: str, listed: bool) -> io.Conditioning:
    """Adds a drawn tensor of `shape`, or a list of it, to a prompt under `name`, as nodes of its model do."""
    drawn = _drawn(_sides(shape), 31)
    return _with(conditioning, **{name: [drawn] if listed else drawn})


@node("TestUnknownLoader")
def unknown_loader(model: io.Model, notes: bool) -> io.Model:
    """Returns a MODEL like one of another pack's loader: it names that pack's loading function (`notes`), or none."""
    model = model.clone()
    model.cached_patcher_init = (unknown_loader, (model, notes)) if notes else None
    return model


@node("TestPackLoader")
def load_state_dict(model_name: str, dtype: str, scale: float) -> io.Model:
    """Loads a model as other packs' loaders do, from a dict of weights, the first of which it may scale."""
    weights = comfy.utils.load_torch_file(folder_paths.get_full_path("diffusion_models", model_name))
    first = next(name for name in weights if name.endswith("proj.weight"))
    weights[first] = weights[first] * scale
    options = {} if dtype == "default" else {"dtype": getattr(torch, dtype)}
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options=options)


@node("TestWrapper")
def wrapped(model: io.Model, scale: float) -> io.Model:
    """Returns a MODEL with a wrapper around its network that scales the prompt."""

    def wrapper(executor, *args, **kwargs):
        # The third argument is the prompt in most classes; in all models here it changes the result.
        return executor(args[0], args[1], args[2] * scale, *args[3:], **kwargs)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", wrapper)
    return model


@node("TestPlacesOfWeights")
def places_of_weights(model: io.Model) -> str:
    """Returns JSON: the bytes of a MODEL's parameters by the type of device that holds them."""
    places: dict[str, int] = {}
    for parameter in model.model.diffusion_model.parameters():
        places[parameter.device.type] = places.get(parameter.device.type, 0) + parameter.nbytes
    return json.dumps(places)
