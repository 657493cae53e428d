"""Converts requests to named tensors and back, and checks the shapes of a module call's inputs."""

from __future__ import annotations

import torch

from ..errors import RequestError, TransportError
from ..requests import (
    Conditioning,
    InputShapes,
    LoopState,
    SampleRequest,
)
from .transport import MOST_BYTES

Tensors = dict[str, torch.Tensor]
ANSWERS, _AT = "state.answers", "state.at"  # names of a loop's state


def within_limit(tensors: Tensors, what: str, remedy: str, beside: str = "") -> Tensors:
    """Returns the payload `tensors`. Raises RequestError if it is too large to send. The error's words: `what` and
    `beside` stand around its size, `remedy` says what helps."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MOST_BYTES:
        raise RequestError(
            f"{what} {size / 2**30:.1f} GiB{beside}, and at most {MOST_BYTES / 2**30:.1f} GiB can be sent to the "
            f"devices at once. {remedy}."
        )
    return tensors


def sample_tensors(request: SampleRequest) -> Tensors:
    """Returns the tensors of a sampling job; its cfg travels in protocol.RunJob."""
    tensors = {"noise": request.noise, "sigmas": request.sigmas}
    for name, prompt in (("positive", request.positive), ("negative", request.negative)):
        parts = {} if prompt is None else vars(prompt)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return tensors


def sample_request(cfg: float, tensors: Tensors) -> SampleRequest:
    """Rebuilds the job that `sample_tensors` packed. Raises TransportError for missing or unknown tensors."""
    left = dict(tensors)
    request = SampleRequest(
        noise=_take(left, "noise"),
        sigmas=_take(left, "sigmas"),
        positive=_take_conditioning(left, "positive"),
        negative=_take_conditioning(left, "negative") if "negative.context" in left else None,
        cfg=cfg,
    )
    if left:
        raise TransportError(f"a payload has unknown tensors: {', '.join(sorted(left))}"[:200])
    return request


def state_tensors(state: LoopState) -> Tensors:
    """Returns a loop's state as tensors, including its numbers."""
    return {
        ANSWERS: state.answers,
        _AT: torch.tensor([state.step, state.first]),
    }


def take_state(tensors: Tensors) -> LoopState | None:
    """Removes the state that `state_tensors` packed from `tensors` and returns it; None if there is none. Raises
    TransportError if it is incomplete or has wrong shapes or dtypes."""
    if ANSWERS not in tensors:
        return None
    answers, at = _take(tensors, ANSWERS), _take(tensors, _AT)
    if (at.dtype, at.shape) != (torch.int64, (2,)) or answers.dtype != torch.float32 or answers.ndim < 4:
        raise TransportError("the answers of model calls in a payload have the wrong shapes or dtypes")
    step, first = at.tolist()
    return LoopState(step, first, answers)


def check_module_inputs(latent: object, context: object, shapes: InputShapes) -> None:
    """Raises RequestError for a prompt or a latent that was made for another model. A latent may have more channels
    than the model's, because other inputs can be joined to it. Checks nothing if the prompt's width is unknown."""
    if not shapes.context:
        return
    if isinstance(context, torch.Tensor) and context.numel() and context.shape[-1] != shapes.context:
        raise RequestError(
            f"the prompt: a prompt of width {context.shape[-1]} came, and {shapes.model} takes prompts of width "
            f"{shapes.context}. Encode it with the text encoders of this model: the text encoders that ComfyUI's own "
            f"loader of this model goes with."
        )
    if isinstance(latent, torch.Tensor) and latent.ndim > 1 and latent.shape[1] < shapes.channels_in:
        raise RequestError(
            f"latent_image: a latent of {latent.shape[1]} channels came, and {shapes.model} takes "
            f"{shapes.channels_in}. Use one of this model's own latent space: the empty latent that ComfyUI has for "
            f"this model."
        )


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
