"""Requests as named tensors and back, and the shape rules they must keep on both sides."""

from __future__ import annotations

import math

import torch

from ..errors import RequestError, TransportError
from ..requests import (
    Conditioning,
    InputShapes,
    LoopState,
    SampleRequest,
    is_finite,
)
from .protocol import Sample

Tensors = dict[str, torch.Tensor]


def sample_tensors(request: SampleRequest) -> Tensors:
    """The tensors of a sampling job; the numbers travel in protocol.Sample."""
    check_sample(request)
    tensors = {"noise": request.noise, "latent": request.latent, "sigmas": request.sigmas}
    if request.denoise_mask is not None:
        tensors["denoise_mask"] = request.denoise_mask
    tensors |= conditioning_tensors(request.positive, "positive")
    if request.negative is not None:
        tensors |= conditioning_tensors(request.negative, "negative")
    return tensors


def sample_request(message: Sample, tensors: Tensors) -> SampleRequest:
    """The sampling job that `sample_tensors` took apart. Raises TransportError for missing or unknown tensors."""
    left = dict(tensors)
    request = SampleRequest(
        noise=_take(left, "noise"),
        latent=_take(left, "latent"),
        sigmas=_take(left, "sigmas"),
        positive=_take_conditioning(left, "positive"),
        negative=_take_conditioning(left, "negative") if "negative.context" in left else None,
        cfg=message.cfg,
        sampler=message.sampler,
        seed=message.seed,
        denoise_mask=left.pop("denoise_mask", None),
    )
    _refuse_rest(left)
    check_sample(request)
    return request


def state_tensors(state: LoopState) -> Tensors:
    """A loop's state, numbers and all."""
    return {
        "state.answers": state.answers,
        "state.at": torch.tensor([state.step, state.first]),
    }


def take_state(tensors: Tensors) -> LoopState | None:
    """Takes what `state_tensors` made out of `tensors`; None where there is none. Raises TransportError for part of
    one, or one of the wrong dtypes."""
    if "state.answers" not in tensors:
        return None
    answers, at = (_take(tensors, f"state.{name}") for name in ("answers", "at"))
    if (at.dtype, at.shape) != (torch.int64, (2,)) or answers.dtype != torch.float32 or answers.ndim < 4:
        raise TransportError("the answers of model calls in a payload have the wrong shapes or dtypes")
    step, first = at.tolist()
    return LoopState(step, first, answers)


def conditioning_tensors(conditioning: Conditioning, name: str) -> Tensors:
    tensors = {f"{name}.context": conditioning.context, f"{name}.pooled": conditioning.pooled}
    if conditioning.guidance is not None:
        tensors[f"{name}.guidance"] = conditioning.guidance
    return tensors


def check_sample(request: SampleRequest) -> None:
    """Raises RequestError, naming the tensor and the shape it must have."""
    shape = tuple(request.latent.shape)
    if len(shape) != 4 or 0 in shape:
        raise RequestError(
            f"the latent has shape {list(shape)}; expected [batch, channels, height/8, width/8]."
        )
    _expect(tuple(request.noise.shape) == shape, "noise", request.noise, f"{list(shape)} like the latent")
    _expect(request.sigmas.ndim == 1 and len(request.sigmas) >= 2, "sigmas", request.sigmas, "[steps + 1]")
    if request.denoise_mask is not None:
        mask, batch, channels = request.denoise_mask, shape[0], shape[1]
        fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, channels)
        _expect(
            fits and tuple(mask.shape[2:]) == shape[2:], "denoise_mask", mask, f"[{batch}, 1, *{shape[2:]}]"
        )
    for conditioning in filter(None, (request.positive, request.negative)):
        _check_conditioning(conditioning, shape[0])
    for name in ("noise", "latent", "sigmas", "denoise_mask"):
        check_finite(name, getattr(request, name))
    if not math.isfinite(request.cfg):
        raise RequestError(f"cfg is {request.cfg}; it must be a finite number.")


def check_inputs(request: SampleRequest, shapes: InputShapes) -> None:
    """Raises RequestError for a prompt or a latent that was made for another model."""
    latent = request.latent
    for name, prompt in zip(("positive", "negative"), request.prompts, strict=False):
        for part, tensor, wanted in (
            ("", prompt.context, shapes.context),
            ("pooled ", prompt.pooled, shapes.pooled),
        ):
            width = tensor.shape[-1] if tensor.ndim else 0
            if width != wanted:
                raise _wrong_prompt(name, part, width, wanted, shapes)
    if latent.ndim > 1 and latent.shape[1] != shapes.channels_in:
        raise _wrong_latent(latent, shapes)


def check_module_inputs(latent: object, context: object, shapes: InputShapes) -> None:
    """As check_inputs, for a call of a module of ComfyUI's own. What stands beside the latent in its channels varies,
    so it may have more of them than the model's latents; nothing is compared where the prompt's width is not known.
    """
    if not shapes.context:
        return
    if isinstance(context, torch.Tensor) and context.numel() and context.shape[-1] != shapes.context:
        raise _wrong_prompt("the prompt", "", context.shape[-1], shapes.context, shapes)
    if isinstance(latent, torch.Tensor) and latent.ndim > 1 and latent.shape[1] < shapes.channels_in:
        raise _wrong_latent(latent, shapes)


def _wrong_prompt(name: str, part: str, width: int, wanted: int, shapes: InputShapes) -> RequestError:
    return RequestError(
        f"{name}: a {part}prompt of width {width} came, and {shapes.model} takes {part}prompts "
        f"of width {wanted}. Encode it with the text encoders of this model: {shapes.text_encoders}."
    )


def _wrong_latent(latent: torch.Tensor, shapes: InputShapes) -> RequestError:
    return RequestError(
        f"latent_image: a latent of {latent.shape[1]} channels came, and {shapes.model} takes "
        f"{shapes.channels_in}. Use one of this model's own latent space: {shapes.latents}."
    )


def _check_conditioning(conditioning: Conditioning, rows: int) -> None:
    context, pooled, guidance = conditioning.context, conditioning.pooled, conditioning.guidance
    some = f"1 or {rows}" if rows > 1 else "1"
    _expect(
        context.ndim == 3 and context.shape[0] in (1, rows), "context", context, f"[{some}, tokens, width]"
    )
    _expect(pooled.ndim == 2 and pooled.shape[0] in (1, rows), "pooled", pooled, f"[{some}, width]")
    if guidance is not None:
        _expect(guidance.ndim == 1 and guidance.shape[0] in (1, rows), "guidance", guidance, f"[{some}]")
    for name in ("context", "pooled", "guidance"):
        check_finite(name, getattr(conditioning, name))


def check_finite(name: str, tensor: torch.Tensor | None) -> None:
    """Numbers that are none would come out as a black image, after all the time of a good one."""
    if tensor is None or not tensor.is_floating_point():
        return
    if not is_finite(tensor.float() if tensor.itemsize == 1 else tensor):  # torch cannot add up fp8
        raise RequestError(
            f"{name} has values that are NaN or infinite, which no step can mend; look at the node that made it."
        )


def _expect(fits: bool, name: str, tensor: torch.Tensor, shape: str) -> None:
    if not fits:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; expected {shape}.")


def _take(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise TransportError(f"a payload lacks the tensor {name!r}")
    return tensors.pop(name)


def _take_conditioning(tensors: Tensors, name: str) -> Conditioning:
    return Conditioning(
        context=_take(tensors, f"{name}.context"),
        pooled=_take(tensors, f"{name}.pooled"),
        guidance=tensors.pop(f"{name}.guidance", None),
    )


def _refuse_rest(tensors: Tensors) -> None:
    if tensors:
        raise TransportError(f"a payload has unknown tensors: {', '.join(sorted(tensors))}"[:200])
