"""Jobs for ComfyUI's own loop on a tiny Flux of ComfyUI's own, and what stock ComfyUI gives for them in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import exp

import torch
from torch import Tensor, nn

from comfy_weight_files import CONTEXT, CPU, POOLED, spec, write
from parallel_backend.models.comfyui.load import load
from parallel_backend.requests import STAY, LoopRequest

STEPS = 4
_SHIFT = 1.15


@cache
def stock_model(path: str):
    return load(spec(path), CPU)


def tiny_model(folder, form: str = "fp32"):
    """The ModelSpec of a file with one block of each kind."""
    return spec(write(folder / "loop.safetensors", form, blocks=1))


def loop_job(
    sampler: str = "euler",
    *,
    steps: int = STEPS,
    batch: int = 1,
    mask: bool = False,
    size: tuple[int, int] = (9, 6),
    **changes,
) -> LoopRequest:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    noise, latent = random(batch, 16, *size), random(batch, 16, *size)
    kept = torch.ones_like(noise)
    kept[..., :3] = 0.25
    sigmas = torch.linspace(1, 0, steps + 1)
    sigmas = 3 * sigmas / (1 + 2 * sigmas)
    request = LoopRequest(
        noise=noise,
        latent=latent if mask else torch.zeros_like(noise),
        sigmas=sigmas,
        conds={
            side: [
                {
                    "model_conds": {
                        "c_crossattn": ("CONDCrossAttn", random(1, 7, CONTEXT)),
                        "y": ("CONDRegular", random(1, POOLED)),
                        "guidance": ("CONDRegular", torch.tensor([3.5])),
                    }
                }
            ]
            for side in ("positive", "negative")
        },
        cfg=2.5,
        sampler=sampler,
        seed=11,
        options={"transformer_options": {"sample_sigmas": sigmas}},
        sampling={
            "classes": ["ModelSamplingFlux", "CONST"],
            "buffers": _buffers(),
            "values": {"shift": _SHIFT},
        },
        mode=STAY,
        denoise_mask=kept if mask else None,
    )
    return replace(request, **changes)


def _buffers() -> dict[str, Tensor]:
    """Of ModelSamplingFlux: the sigmas of its timesteps."""
    times = torch.arange(1, 10001) / 10000
    return {"sigmas": exp(_SHIFT) / (exp(_SHIFT) + 1 / times - 1)}


@torch.inference_mode()
def stock_latent(path: str, job: LoopRequest, sampling: nn.Module | None = None) -> Tensor:
    """What ComfyUI's own guider and sampler give, with nothing of the pack between them and the module. `sampling`: in
    place of the model's own."""
    import comfy.conds
    from comfy.samplers import CFGGuider, sampler_object

    patcher = stock_model(path).patcher.clone()
    if sampling is not None:
        patcher.add_object_patch("model_sampling", sampling)
    patcher.patch_model(load_weights=False)
    patcher.pre_run()
    guider = CFGGuider(patcher)
    guider.inner_model = patcher.model
    guider.set_cfg(job.cfg)
    guider.conds = {
        side: [
            {
                **prompt,
                "uuid": None,
                "model_conds": {
                    name: getattr(comfy.conds, kind)(value)
                    for name, (kind, value) in prompt["model_conds"].items()
                },
            }
            for prompt in prompts
        ]
        for side, prompts in job.conds.items()
    }
    extra = {"model_options": dict(job.options), "seed": job.seed}
    try:
        return sampler_object(job.sampler).sample(
            guider,
            job.sigmas,
            extra,
            None,
            job.noise.clone(),
            job.latent,
            job.denoise_mask,
            disable_pbar=True,
        )
    finally:
        patcher.unpatch_model(unpatch_weights=False)
