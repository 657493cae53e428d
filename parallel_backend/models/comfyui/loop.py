"""One sampling job by ComfyUI's own loop in a rank: its sampler, its guider, its way from prompts to model calls.

The first rank samples; every rank computes the model calls that it asks for. The hook at which they part is ComfyUI's
own: `sampler_calc_cond_batch_function`, which is asked for what the model gives before guidance.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...requests import LoopRequest, ModuleCall
from ...wire.arguments import map_tensors
from ..proof.states import Verdict
from .calls import OPTIONS, in_host_memory, made_replaced, module_call

if TYPE_CHECKING:
    from .model import ComfyUIModel

Compute = Callable[[ModuleCall], Any]
# A sampler of ComfyUI's form: (model, x, sigmas, extra_args=…, callback=…, disable=…) -> x, with model(x, sigma [B],
# **extra_args) giving what is denoised.
SamplerFunction = Callable[..., Tensor]
# (whether the positive and the negative prompt are asked for, x [B, C, …], sigma [B]) -> of each what the model gives.
Answers = Callable[[tuple[bool, ...], Tensor, Tensor], list[Tensor]]
_HOOK = "sampler_calc_cond_batch_function"
_HOST = torch.device("cpu")


class ComfyUILoop:
    """`compute`: a network call, which all ranks make together."""

    def __init__(self, model: ComfyUIModel, request: LoopRequest, compute: Compute) -> None:
        """Raises RequestError for a sampling or a prompt that is not ComfyUI's."""
        self._request = _placed(request, model.device)
        self._asked: Counter[tuple[int, ...]] = (
            Counter()
        )  # how often in this model call, by the numbers of prompts

        def of_prompts(call: ModuleCall) -> Any:
            self._asked[call.prompts] += 1  # several areas may share a prompt
            return compute(replace(call, prompts=(*call.prompts, self._asked[call.prompts])))

        self._model = _base_model(model, self._request, of_prompts)
        self._sides = [self._prompts("positive"), self._prompts("negative")]
        for number, prompt in enumerate(prompt for side in self._sides for prompt in side or ()):
            prompt["uuid"] = number

    @property
    def request(self) -> LoopRequest:
        """On the model's device."""
        return self._request

    @property
    def sampler(self) -> str:
        return self._request.sampler

    def new_call(self) -> tuple[Tensor, Tensor]:
        """x [B, C, …] and sigma [B] of a model call, to be filled."""
        noise = self._request.noise
        return torch.empty_like(noise), noise.new_empty(len(noise))

    def answers(self, wanted: tuple[bool, ...], x: Tensor, sigma: Tensor) -> list[Tensor]:
        """What the model gives for x of each side, zeros for one that is not wanted. All ranks call it together."""
        from comfy.samplers import calc_cond_batch

        self._asked.clear()
        sides = [side if is_wanted else None for side, is_wanted in zip(self._sides, wanted, strict=True)]
        options = copy.copy(self._request.options)
        options["transformer_options"] = dict(options.get("transformer_options", {}))
        return calc_cond_batch(self._model, sides, x, sigma, options)

    def sample(
        self, answers: Answers, on_step: Callable[[Tensor], None], function: SamplerFunction | None = None
    ) -> Tensor:
        """The latent, as ComfyUI's sampler of that name gives it, or `function` in its place. `on_step`: is given the
        denoised latent of a step by ComfyUI's."""
        from comfy.samplers import KSAMPLER, CFGGuider, KSampler, sampler_object

        request = self._request
        if request.sampler not in KSampler.SAMPLERS:
            raise RequestError(
                f"the ranks' ComfyUI has no sampler {request.sampler!r}; choose one that it lists."
            )
        guider = CFGGuider(self._model.current_patcher)
        guider.inner_model = self._model
        guider.conds = {"positive": self._sides[0], "negative": self._sides[1]}
        guider.set_cfg(request.cfg)

        def hook(asked: dict[str, Any]) -> list[Tensor]:
            wanted = tuple(side is not None for side in asked["conds"])
            return answers(wanted, asked["input"], asked["sigma"])

        def callback(step: int, denoised: Tensor, x: Tensor, steps: int) -> None:
            on_step(denoised)

        sampler = sampler_object(request.sampler) if function is None else KSAMPLER(function)
        return sampler.sample(
            guider,
            request.sigmas,
            {"model_options": request.options | {_HOOK: hook}, "seed": request.seed},
            callback,
            request.noise,
            request.latent,
            request.denoise_mask,
            disable_pbar=True,
        )

    def _prompts(self, side: str) -> list[dict[str, Any]] | None:
        """As ComfyUI's guider has them; None where there are none."""
        prompts = self._request.conds.get(side)
        return None if prompts is None else [_prompt(prompt) for prompt in prompts]


def _placed(request: LoopRequest, device: torch.device) -> LoopRequest:
    """The same job with its tensors where ComfyUI would have them when `device` computes the model."""
    on_host = {
        id(tensor)
        for side in request.conds.values()
        for prompt in side
        for tensor in in_host_memory({name: value for name, (_, value) in prompt["model_conds"].items()})
    }

    def own(tensor: Tensor) -> Tensor:
        # Copied there too: the payload is read-only, and aligned in another way where a job is resumed.
        return tensor.to(_HOST if id(tensor) in on_host else device, copy=True)

    return LoopRequest(**map_tensors(vars(request), own))


def _prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    found = {
        name: _cond(kind, made_replaced(name, value, object))
        for name, (kind, value) in prompt["model_conds"].items()
    }
    return {**prompt, "model_conds": found}


def _cond(kind: str, value: Any) -> Any:
    import comfy.conds

    return _class_of(comfy.conds, kind)(value)


def _class_of(module: Any, name: str) -> type:
    found = getattr(module, name, None)
    if not isinstance(found, type) or found.__module__ != module.__name__:
        raise RequestError(f"the ranks' ComfyUI has no {name!r} in {module.__name__}; restart ComfyUI.")
    return found


def _base_model(model: ComfyUIModel, request: LoopRequest, compute: Compute) -> Any:
    """ComfyUI's BaseModel with the request's sampling, whose network calls are shared out."""
    from comfy.model_patcher import ModelPatcher

    class Patcher(ModelPatcher):
        def get_free_memory(self, device: torch.device) -> int:
            """Of which ComfyUI asks how many prompts go into one call: all ranks must find the same."""
            return sys.maxsize

    own: Any = model.patcher.model
    kind: Any = type(own)
    shared = kind.__new__(kind)
    shared.__dict__.update(own.__dict__)
    shared.__dict__["_modules"] = {
        name: module
        for name, module in own._modules.items()
        if name not in ("diffusion_model", "model_sampling")
    }
    shared.diffusion_model = _SharedNetwork(model.module, partial(_compute, model, request.mode, compute))
    shared.model_sampling = _sampling(request.sampling)
    shared.current_patcher = Patcher(shared, model.patcher.load_device, model.patcher.offload_device)
    return shared


def _compute(model: ComfyUIModel, mode: str, compute: Compute, *args: Any, **kwargs: Any) -> Any:
    call = module_call(type(model.module).__name__, Verdict(mode), args, kwargs)
    return compute(replace(call, prompts=tuple(kwargs[OPTIONS]["uuids"])))


def _sampling(described: dict[str, Any]) -> Any:
    """The object that ComfyUI's process has described (nodes/model/loop.py)."""
    import comfy.model_sampling

    classes = tuple(_class_of(comfy.model_sampling, name) for name in described["classes"])
    made: Any = type("ModelSampling", classes, {})
    sampling = made.__new__(made)
    if isinstance(sampling, nn.Module):
        nn.Module.__init__(sampling)
        for name, buffer in described["buffers"].items():
            sampling.register_buffer(name, buffer)
    for name, value in described["values"].items():
        setattr(sampling, name, value)
    return sampling


class _SharedNetwork(nn.Module):
    """Stands where BaseModel calls its network; whatever else is read of it is the network's."""

    def __init__(self, network: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["network"] = network  # not a part of it: it is moved and counted where it belongs
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["network"], name)
