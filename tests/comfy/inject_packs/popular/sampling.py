"""A guider and a sampler of the pack's own classes, and a node that calls the model itself."""

from __future__ import annotations

import itertools
import threading

import comfy.model_management
import torch
from comfy.samplers import KSAMPLER, CFGGuider, calc_cond_batch

from .node import node


class MomentumGuider(CFGGuider):
    """A CFG guider that adds a part of its previous direction, `momentum`, to each new one."""

    def set_momentum(self, momentum: float) -> None:
        self.momentum, self.before = momentum, None

    def predict_noise(self, x, timestep, model_options=None, seed=None):
        conds = [self.conds["negative"], self.conds["positive"]]
        uncond, cond = calc_cond_batch(self.inner_model, conds, x, timestep, model_options or {})
        direction = cond - uncond
        if self.before is not None:
            direction = direction + self.momentum * self.before
        self.before = direction
        return cond + (self.cfg - 1) * direction


@node(
    "TestPackGuider", "GUIDER", model="MODEL", positive="CONDITIONING", negative="CONDITIONING", cfg="FLOAT"
)
def pack_guider(model, positive, negative, cfg):
    """Returns a GUIDER of the pack's class."""
    guider = MomentumGuider(model)
    guider.set_conds(positive, negative)
    guider.set_cfg(cfg)
    guider.set_momentum(0.5)
    return guider


@node(
    "TestLockedGuider", "GUIDER", model="MODEL", positive="CONDITIONING", negative="CONDITIONING", cfg="FLOAT"
)
def locked_guider(model, positive, negative, cfg):
    """Returns a guider with a lock, which cannot be sent to a rank."""
    guider = pack_guider(model, positive, negative, cfg)
    guider.lock = threading.Lock()
    return guider


class RestlessSampler(KSAMPLER):
    """A sampler that draws noise from two generators. If the prediction has changed much, it calls the model again."""

    def __init__(self, noise: float) -> None:
        super().__init__(self.steps)
        self.noise, self.looks = noise, 0

    def steps(self, model, x, sigmas, extra_args=None, callback=None, disable=None):
        extra_args = extra_args or {}
        generator = torch.Generator(device=x.device).manual_seed(extra_args.get("seed", 0))
        ones, before = x.new_ones(x.shape[0]), None
        for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
            denoised = model(x, sigma * ones, **extra_args)
            if callback is not None:
                callback({"x": x, "i": step, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
            if before is not None and (denoised - before).std() > 0.01 and following > 0:
                ahead = denoised + (x - denoised) * (following / sigma)
                denoised = (denoised + model(ahead, following * ones, **extra_args)) / 2
                self.looks += 1
            before = denoised
            x = denoised + (x - denoised) * (following / sigma)
            drawn = torch.randn(x.shape, generator=generator, device=x.device) + torch.randn_like(x)
            x = x + self.noise * following * drawn
        return x


@node("TestPackSampler", "SAMPLER", noise="FLOAT")
def pack_sampler(noise):
    """Returns a SAMPLER of the pack's class."""
    return RestlessSampler(noise)


def _along_tangents(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Euler's steps with the second order of the model's derivative along its direction."""
    extra_args, ones = extra_args or {}, x.new_ones(x.shape[0])
    for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):

        def slope(x, sigma=sigma):
            return (x - model(x, sigma * ones, **extra_args)) / sigma

        direction, turn = torch.func.jvp(slope, (x,), (torch.ones_like(x),))
        if callback is not None:
            callback(
                {"x": x, "i": step, "sigma": sigma, "sigma_hat": sigma, "denoised": x - sigma * direction}
            )
        x = x + (following - sigma) * direction + 0.1 * (following - sigma) ** 2 * turn
    return x


@node("TestTangentSampler", "SAMPLER")
def tangent_sampler():
    """Returns a SAMPLER that differentiates the model."""
    return KSAMPLER(_along_tangents)


@node("TestDirectCalls", "LATENT", model="MODEL", positive="CONDITIONING", latent="LATENT")
@torch.inference_mode()
def direct_calls(model, positive, latent):
    """Samples without ComfyUI's samplers: two steps call the model, a third one calls its network."""
    comfy.model_management.load_models_gpu([model])
    context, pooled = positive[0][0], positive[0][1].get("pooled_output")
    shape = latent["samples"].shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    named = {"c_crossattn": context, "y": pooled}
    named = {name: value for name, value in named.items() if value is not None}
    options = model.model_options["transformer_options"]
    for sigma, following in ((1.0, 0.6), (0.6, 0.2)):
        sigmas = torch.full((shape[0],), sigma)
        denoised = model.model.apply_model(x, sigmas, transformer_options=options, **named)
        x = denoised + (x - denoised) * (following / sigma)
    others = {"y": pooled} if pooled is not None else {}
    velocity = model.model.diffusion_model(
        x, torch.full((shape[0],), 0.2), context=context, transformer_options=options, **others
    )
    return {"samples": x - 0.2 * velocity}
