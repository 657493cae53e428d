"""Jobs as ComfyUI's process ships them, made in the test's process: sampler runs with prepared prompts, and calls of
networks, text encoders and VAEs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from comfy_modules import import_comfyui_here
from comfy_weight_files import CPU
from parallel_backend.job.payload import (
    INPUTS,
    EncoderCall,
    HalfVae,
    Head,
    HeldTextEncoder,
    NetworkCall,
    PickledJob,
    ProcessFacts,
    SamplerRun,
    VaeCall,
    pack_facts,
    pack_payload,
)
from parallel_backend.job.pickling import pickle_job
from parallel_backend.job.state_changes import generator_states
from parallel_backend.job.tensors import SentTensors
from parallel_backend.job.torch_settings import torch_settings
from parallel_backend.models.comfyui.load import load
from parallel_backend.requests import STAY, InputShapes, ModelSpec
from parallel_backend.sidecar.resume import ShippedRequest
from parallel_backend.trials import NO_TRIALS, TrialPlan

ANYTHING = InputShapes("a model", 0, 0, 0, 0)


@dataclass(frozen=True)
class LoopJob:
    """A sampler run. noise, latent: [B, C, …] float32; sigmas: [S + 1]; `conds`: by side, the prompts as ComfyUI has
    them, but with (name of a class in comfy.conds, value) as model_conds; `sampling`: arguments of
    sampling_of, to replace the model's sampling; `changes`: tensors to add to weights, by name."""

    noise: Tensor
    latent: Tensor
    sigmas: Tensor
    conds: dict[str, list[dict[str, Any]]]
    cfg: float
    sampler: str
    seed: int
    denoise_mask: Tensor | None = None
    cache_threshold: float = 0.0
    sampling: tuple[str, str, dict[str, Any]] | None = None
    changes: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def stock_model(spec: ModelSpec):
    """Returns the model of a file, loaded once in this process."""
    return load(spec, CPU)


def sampling_of(schedule: str, kind: str, **values: Any) -> nn.Module:
    """Returns a sampling made of two classes of comfy.model_sampling, by their names. `values`: its attributes."""
    import_comfyui_here()
    import comfy.model_sampling as known

    found = type("ModelSampling", (getattr(known, schedule), getattr(known, kind)), {})()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def guider_of(spec: ModelSpec, job: LoopJob):
    """Returns a guider of ComfyUI whose `outer_sample` starts after the preparation of prompts."""
    import comfy.conds
    import comfy.model_management
    from comfy.samplers import CFGGuider

    class Prepared(CFGGuider):
        def outer_sample(
            self, noise, latent, sampler, sigmas, mask=None, callback=None, disable=False, seed=None, **others
        ):
            patcher = self.model_patcher
            comfy.model_management.load_models_gpu([patcher])
            patcher.pre_run()
            self.inner_model, device = patcher.model, patcher.load_device
            for cond in [one for side in self.conds.values() for one in side]:
                for value in cond["model_conds"].values():
                    value.cond = tree_map_only(Tensor, lambda tensor: tensor.to(device), value.cond)
            noise, latent, sigmas = (one.to(device) for one in (noise, latent, sigmas))
            mask = None if mask is None else mask.to(device)
            extra = {"model_options": self.model_options, "seed": seed}
            return sampler.sample(self, sigmas, extra, callback, noise.clone(), latent, mask, True)

    patcher = stock_model(spec).patcher.clone()
    if job.sampling is not None:
        schedule, kind, values = job.sampling
        patcher.add_object_patch("model_sampling", sampling_of(schedule, kind, **values))
    if job.changes:
        added = {f"diffusion_model.{name}": ("diff", (change,)) for name, change in job.changes.items()}
        patcher.add_patches(added)
    guider = Prepared(patcher)
    guider.set_cfg(job.cfg)
    guider.model_options = {"transformer_options": {"sample_sigmas": job.sigmas}}
    guider.conds = {
        side: [
            {
                **prompt,
                "uuid": f"{side} {number}",
                "model_conds": {
                    name: getattr(comfy.conds, kind)(value)
                    for name, (kind, value) in prompt["model_conds"].items()
                },
            }
            for number, prompt in enumerate(prompts)
        ]
        for side, prompts in job.conds.items()
    }
    return guider


def _arguments(job: LoopJob) -> tuple[Any, ...]:
    from comfy.samplers import sampler_object

    sampler = sampler_object(job.sampler)
    return (job.noise, job.latent, sampler, job.sigmas, job.denoise_mask, job.seed)


@torch.inference_mode()
def stock_latent(spec: ModelSpec, job: LoopJob) -> Tensor:
    """Returns the latent of ComfyUI's own guider and sampler, without code of the pack between them and the module."""
    noise, latent, sampler, sigmas, mask, seed = _arguments(job)
    return guider_of(spec, job).outer_sample(noise, latent, sampler, sigmas, mask, seed=seed)


def ship(spec: ModelSpec, job: LoopJob, mode: str = STAY, trials: TrialPlan = NO_TRIALS) -> ShippedRequest:
    """Returns the request for a sampler run. `mode`: token mode of the model's class, see requests.TOKEN_MODES."""
    work = SamplerRun(guider_of(spec, job), [], _arguments(job), None)
    tensors = _pack(work, stock_model(spec).patcher.model, mode, job.cache_threshold)
    return ShippedRequest(
        job.noise, len(job.sigmas) - 1, lambda _: tensors, job.cache_threshold, trials=trials
    )


def ship_call(
    spec: ModelSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str = STAY
) -> ShippedRequest:
    """Returns the request for one call of a network."""
    work = NetworkCall(stock_model(spec).patcher.clone(), args, dict(kwargs))
    tensors = _pack(work, stock_model(spec).patcher.model, mode)
    first = args[0] if isinstance(args[0], Tensor) else args[0][0]
    return ShippedRequest(first, 1, lambda _: tensors, is_call=True)


def ship_module(module: nn.Module | HalfVae):
    """Returns the payload from which ranks load a text encoder, or half a VAE."""
    from comfy.model_patcher import ModelPatcher

    work = module if isinstance(module, HalfVae) else HeldTextEncoder(module, ModelPatcher)
    return _pack(work)


def ship_encoder_call(module: nn.Module, args: tuple[Any, ...], method: str = ""):
    """Returns the payload of a call of a text encoder."""
    from comfy.model_patcher import ModelPatcher

    return _pack(EncoderCall(ModelPatcher(module, CPU, CPU), "", method, args, {}), module)


def ship_vae_call(inputs: Tensor, shares: tuple[float, ...] = ()):
    """Returns the payload of a decode or encode."""
    return _pack(VaeCall(shares)) | {INPUTS: inputs}


def _pack(work, base: nn.Module | None = None, mode: str = "", threshold: float = 0.0):
    from comfy.model_patcher import ModelPatcher

    job = PickledJob(work, (), (), generator_states(CPU), torch_settings(), cache_threshold=threshold)
    pickled = pickle_job(job, {} if base is None else _known(base), SentTensors(), ModelPatcher)
    facts = ProcessFacts(import_comfyui_here().root, "", "the pack", {}, tuple(sys.path), {})
    head = Head(
        job=pickled.data,
        is_fresh=True,
        dropped=(),
        facts=pack_facts(facts),
        packs=(),
        mode=mode,
        inputs=astuple(ANYTHING),
        prints=None,
        digests={},
    )
    return pack_payload(head, pickled.tensors)


def _known(base: nn.Module) -> dict[int, tuple[str, ...]]:
    """Returns references to the modules and tensors of a model that ranks hold, by Python id."""
    known: dict[int, tuple[str, ...]] = {id(base): ("base",)}
    for path, module in base.named_modules():
        if path:
            known.setdefault(id(module), ("module", path))
    for name, tensor in [*base.named_parameters(), *base.named_buffers()]:
        known.setdefault(id(tensor), ("param", name))
    return known
