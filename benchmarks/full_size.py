"""ComfyUI's own networks at full size with random weights, and a job of two steps at 256 x 256 for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import subject  # noqa: F401  puts the tests' support on the path
import torch
from safetensors.torch import save_file
from torch import nn

from comfy_modules import import_comfyui_here
from comfy_weight_files import spec
from pack_nodes import import_node_module
from parallel_backend.models.proof.states import PROVEN_HERE
from parallel_backend.planner.plan import job_from_latent
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.requests import ModelSpec
from shipped_jobs import LoopJob, stock_model

SIDE, TEXT, CFG = 32, 77, 2.5  # latent pixels per side, tokens of a prompt
_WIDTHS = {"sd15": 768, "sdxl": 2048, "wan": 4096}  # channels of a prompt
_POOLED = 2816


def write(kind: str, folder: Path) -> ModelSpec:
    """Writes the file of `kind` (sd15, sdxl, wan: 1.7, 5.1, 2.8 GB) to `folder` if it is missing; returns its spec."""
    import_comfyui_here()
    path = folder / f"{kind}.safetensors"
    if not path.exists():
        prefix = "" if kind == "wan" else "model.diffusion_model."
        tensors = {
            prefix + name: (torch.randn(weight.shape) * 0.02).to(weight.dtype)
            for name, weight in _module(kind).state_dict().items()
        }
        save_file(tensors, path)
    return spec(path)


def sampler_run(kind: str) -> LoopJob:
    noise = torch.randn(1, 16, 1, SIDE, SIDE) if kind == "wan" else torch.randn(1, 4, SIDE, SIDE)
    prompt: dict[str, Any] = {"c_crossattn": ("CONDCrossAttn", torch.randn(1, TEXT, _WIDTHS[kind]))}
    if kind == "sdxl":
        prompt["y"] = ("CONDRegular", torch.randn(1, _POOLED))
    return LoopJob(
        noise=noise,
        latent=torch.zeros_like(noise),
        sigmas=torch.tensor([1.0, 0.5, 0.0] if kind == "wan" else [14.6, 2.0, 0.0]),
        conds={side: [{"model_conds": prompt}] for side in ("positive", "negative")},
        cfg=CFG,
        sampler="euler",
        seed=1,
    )


def planned(model: ModelSpec, run: LoopJob) -> Job:
    """Returns the job as the planner sees it."""
    facts = import_node_module("nodes.model.facts")
    file = facts.count_facts(model.path, stock_model(model).patcher.model, PROVEN_HERE)
    steps = len(run.sigmas) - 1
    return job_from_latent(CheckpointModel(file), run.noise.shape, text=TEXT, has_cfg=True, steps=steps)


def _module(kind: str) -> nn.Module:
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.ldm.wan.model import WanModel

    common: dict[str, Any] = {"device": "meta", "operations": comfy.ops.disable_weight_init}
    if kind == "wan":
        return WanModel(
            model_type="t2v",
            dim=1536,
            ffn_dim=8960,
            num_heads=12,
            num_layers=30,
            text_dim=_WIDTHS[kind],
            dtype=torch.bfloat16,
            **common,
        )
    common |= {
        "image_size": SIDE,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 320,
        "use_spatial_transformer": True,
        "legacy": False,
        "context_dim": _WIDTHS[kind],
        "dtype": torch.float16,
    }
    if kind == "sd15":
        return UNetModel(
            num_res_blocks=[2] * 4,
            channel_mult=(1, 2, 4, 4),
            num_heads=8,
            num_head_channels=-1,
            transformer_depth=[1] * 6 + [0] * 2,
            transformer_depth_output=[1] * 9 + [0] * 3,
            transformer_depth_middle=1,
            **common,
        )
    return UNetModel(
        num_res_blocks=[2] * 3,
        channel_mult=(1, 2, 4),
        num_head_channels=64,
        transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_output=[0] * 3 + [2] * 3 + [10] * 3,
        transformer_depth_middle=10,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=_POOLED,
        **common,
    )
