"""Counts on the meta device for steps of Flux.1-dev at full size, the pack's under any strategy and diffusers' own.

So for calls of ComfyUI's Wan in a tiny size, which need ComfyUI at COMFYUI_PATH.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from comfy_modules import import_comfyui_here
from dispatch_counter import CPU, DEVICE, Counts, counted, world_of_one_process
from module_devices import as_in_a_rank, comfyui_on_the_device, forward_of, on_device
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import ModuleForward, make_module_forward
from parallel_backend.engine.plain_calls import answers_to
from parallel_backend.models.comfyui.tiny.cases import TinyModel, build_tiny, tiny_inputs
from parallel_backend.models.diffusers.keys import FLUX_DEV, FluxDims, original_shapes
from parallel_backend.requests import (
    BLOCK,
    STAY,
    Conditioning,
    ModelSpec,
    ModuleCall,
    Placement,
    Rows,
    SampleRequest,
)
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import run_plain
from sparse_checkpoint import write_sparse


@dataclass(frozen=True)
class Size:
    """Sizes of a counted model call. Default: Flux.1-dev at 1024 x 1024, on the device that stands for a GPU."""

    dims: FluxDims = FLUX_DEV
    latent: tuple[int, ...] = (1, 16, 128, 128)
    text: int = 512
    device: torch.device = DEVICE

    @classmethod
    def small(cls) -> Size:
        """Returns sizes that the CPU can compute."""
        dims = replace(FLUX_DEV, hidden=256, heads=2, mlp=1024, context_dim=64, pooled_dim=32)
        return cls(dims, (1, 16, 16, 16), 16, CPU)

    def empty(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def prompt(self) -> Conditioning:
        dims = self.dims
        return Conditioning(
            self.empty(1, self.text, dims.context_dim), self.empty(1, dims.pooled_dim), self.empty(1)
        )


FLUX_DEV_1024 = Size()


@contextmanager
def flux_calls(
    strategy: ParallelStrategy, double: int, single: int, size: Size = FLUX_DEV_1024
) -> Iterator[ModuleForward]:
    """Yields the first rank's forward of a model with `double` and `single` blocks."""
    dims = replace(size.dims, double_blocks=double, single_blocks=single)
    with (
        tempfile.TemporaryDirectory() as folder,
        world_of_one_process(0, strategy.world_size, size.device) as world,
    ):
        path = write_sparse(Path(folder) / "flux.safetensors", original_shapes(dims))
        layouts = Layouts(world)
        model = load_under(ModelSpec(str(path)), layouts, strategy)
        yield make_module_forward(model, layouts, Placement(strategy))


def call_counted(forward: ModuleForward) -> Counts:
    """Returns the counts of a model call of one row."""
    size = FLUX_DEV_1024
    rows = [Rows(size.empty(*size.latent), size.empty(1), size.prompt())]
    with torch.inference_mode(), counted() as counter:
        answers_to(rows, forward.model.module, forward)
    return counter.counts


def step_counted(forward: ModuleForward, cfg: float = 1.0, size: Size = FLUX_DEV_1024) -> Counts:
    """Returns the counts of one Euler step of whole images, from one step boundary to the next."""
    request = SampleRequest(
        noise=size.empty(*size.latent),
        sigmas=size.empty(3),
        positive=size.prompt(),
        negative=size.prompt() if cfg != 1.0 else None,
        cfg=cfg,
    )
    counts: list[Counts] = []  # up to each step boundary
    with counted(size.device) as counter:
        run_plain(forward, request, lambda i, denoised: counts.append(counter.counts))
    return counts[1] - counts[0]


def diffusers_call(blocks: tuple[int, int]) -> Counts:
    """Returns the counts of a Flux.1-dev call under diffusers' own Ulysses of two. `blocks`: (double, single)."""
    size, dims, dtype = FLUX_DEV_1024, FLUX_DEV, torch.bfloat16
    with world_of_one_process(0, 2), torch.device(DEVICE):
        model = FluxTransformer2DModel(
            num_layers=blocks[0], num_single_layers=blocks[1], guidance_embeds=True
        )
        model = model.to(dtype).eval()
        # diffusers asks which device the rank computes on
        with torch.device(CPU), patch("torch.accelerator.device_count", return_value=1):
            mesh = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("ring", "ulysses"))
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
        tokens = size.latent[2] * size.latent[3] // 4
        with torch.inference_mode(), warnings.catch_warnings(), counted() as counter:
            warnings.simplefilter("ignore", FutureWarning)  # torch warns about diffusers' code
            model(
                hidden_states=torch.zeros(1, tokens, dims.in_channels, dtype=dtype),
                encoder_hidden_states=torch.zeros(1, size.text, dims.context_dim, dtype=dtype),
                pooled_projections=torch.zeros(1, dims.pooled_dim, dtype=dtype),
                timestep=torch.zeros(1, dtype=dtype),
                guidance=torch.zeros(1),
                img_ids=torch.zeros(tokens, 3),
                txt_ids=torch.zeros(size.text, 3),
                return_dict=False,
            )
    return counter.counts


MODES = {"wan_stay": STAY, "wan_block": BLOCK}
LAYERS = (2, 4)


def module_call(tokens: str, layers: int) -> Counts:
    """Returns the counts of one call of a Wan with `layers` blocks, on the first of two Ulysses ranks."""
    import_comfyui_here()
    model = TinyModel(build_tiny("wan"))
    model.module.blocks = model.module.blocks[:layers]
    args, kwargs = tiny_inputs("wan")(1, 16, 16)
    args, kwargs = as_in_a_rank(args, kwargs | {"transformer_options": {}})
    call = ModuleCall(args, kwargs, 1, tokens)
    with (
        forward_of(on_device(model), ParallelStrategy(ulysses_degree=2), 0) as forward,
        comfyui_on_the_device(),
        torch.inference_mode(),
        counted() as counter,
    ):
        forward(call)
    return counter.counts
