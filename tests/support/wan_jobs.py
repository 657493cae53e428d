"""Jobs for ComfyUI's sampling loop on a tiny version of its Wan, and an oracle for PipeFusion in one process.

So on tiny models of video and sound, whose latent has both in one flat tensor.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import save_model
from torch import Size, Tensor

from comfy_modules import import_comfyui_here
from comfy_weight_files import spec
from parallel_backend.models.comfyui.tiny.cases import build_tiny, config_of
from parallel_backend.models.comfyui.tiny.weights import fill, random
from parallel_backend.requests import ModelSpec
from shipped_jobs import LoopJob, sampling_of, stock_model

BLOCKS, TEXT, SHIFT, STEPS = 5, 4096, 3.0, 4
FRAMES, HEIGHT, WIDTH = 3, 9, 6  # 3 x 5 x 3 tokens; the last row of each frame reaches beyond the latent


def tiny_wan(folder, blocks: int = BLOCKS, dim: int = 128):
    """Writes a tiny Wan to a file and returns its ModelSpec."""
    import_comfyui_here()
    sizes = {"dim": dim, "ffn_dim": 3 * dim // 2, "num_heads": dim // 128, "num_layers": blocks}
    path = folder / f"{blocks} {dim}.safetensors"
    save_model(fill(build_tiny("wan", freq_dim=256, text_dim=TEXT, **sizes)), path)
    return spec(path)


def wan_job(
    sampler: str = "euler",
    *,
    steps: int = STEPS,
    batch: int = 1,
    size: tuple[int, int, int] = (FRAMES, HEIGHT, WIDTH),
    **changes,
) -> LoopJob:
    """Returns a job with two prompts of different lengths, so that each gets a separate network call."""
    shape = (batch, 16, *size)
    sigmas = torch.linspace(1, 0, steps + 1)
    sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
    conds = two_prompts(TEXT, {})
    request = LoopJob(random(*shape, seed=1), torch.zeros(shape), sigmas, conds, 2.5, sampler, seed=11)
    return replace(request, **changes)


def two_prompts(width: int, beside: dict) -> dict:
    """Returns prompts of different lengths. `width`: of a text token; `beside`: what else both have."""
    return {
        side: [{"model_conds": {"c_crossattn": ("CONDRegular", random(1, words, width, seed=5)), **beside}}]
        for side, words in (("positive", 7), ("negative", 4))
    }


class _StaleKeys:
    """Replaces ComfyUI's attention: attends over the newest keys and values of all tokens. `places`: positions of the
    current tokens. Every second call is attention to the prompt and stays unchanged."""

    def __init__(self, original) -> None:
        self.original, self.kept, self.calls, self.places, self.key = original, {}, 0, None, None

    def begin(self, key, places) -> None:
        self.key, self.places, self.calls = key, places, 0

    def __call__(self, q, k, v, *args, **kwargs):
        number, is_own = divmod(self.calls, 2)
        self.calls += 1
        if not is_own:
            kept = self.kept.setdefault((self.key, number), {})
            for n, place in enumerate(self.places):
                kept[place] = k[:, n], v[:, n]
            k, v = (torch.stack([kept[place][i] for place in sorted(kept)], 1) for i in range(2))
        return self.original(q, k, v, *args, **kwargs)


@torch.inference_mode()
def patchwise_latent(
    spec: ModelSpec, job: LoopJob, warmup: int, patches: tuple[int, ...], *, flow: bool = True
) -> Tensor:
    """Returns the latent of a text-to-video job after Euler steps, without code of the engine. `patches`: tokens of
    each; `flow`: True if the network gives velocities. Else it gives noise, and a latent has sigma times that noise."""
    import comfy.ldm.wan.model as wan

    module = stock_model(spec).module
    stale, original = _StaleKeys(wan.optimized_attention), wan.optimized_attention
    rows, columns = -(-HEIGHT // 2), -(-WIDTH // 2)
    everything = list(range(FRAMES * rows * columns))
    parts = [everything[sum(patches[:i]) : sum(patches[: i + 1])] for i in range(len(patches))]
    # The token of each element: frame, row and column of its 2 x 2 cell.
    frames, height, width = torch.meshgrid(*map(torch.arange, (FRAMES, HEIGHT, WIDTH)), indexing="ij")
    owner = (frames * rows + height // 2) * columns + width // 2

    def velocity(x: Tensor, sigma: Tensor, side: str, places: list[int]) -> Tensor:
        stale.begin(side, places)
        time = sigma * 1000
        if not flow:
            x = x / (1 + sigma**2) ** 0.5
            levels = sampling_of(*job.sampling[:2]).sigmas
            time = (levels.log() - sigma.log()).abs().argmin().float()
        time = wan.sinusoidal_embedding_1d(module.freq_dim, time.reshape(1))
        e = module.time_embedding(time).reshape(1, 1, -1)
        e0 = module.time_projection(e).unflatten(2, (6, module.dim))
        padded = wan.comfy.ldm.common_dit.pad_to_patch_size(x, module.patch_size)
        tokens = module.patch_embedding(padded).flatten(2).transpose(1, 2)
        freqs = module.rope_encode(FRAMES, HEIGHT, WIDTH)
        context = module.text_embedding(job.conds[side][0]["model_conds"]["c_crossattn"][1])
        own = tokens[:, places]
        for block in module.blocks:
            own = block(own, e=e0, freqs=freqs[:, places], context=context)
        out = torch.zeros(1, len(everything), 64)
        out[:, places] = module.head(own, e)
        return module.unpatchify(out, (FRAMES, rows, columns))[..., :HEIGHT, :WIDTH]

    x = job.noise.clone() if flow else job.noise * job.sigmas[0]
    # The input of each patch's last call; tokens beyond the latent's edge repeat elements of another patch.
    seen = x.clone()
    wan.optimized_attention = stale
    try:
        for i, (sigma, following) in enumerate(zip(job.sigmas[:-1], job.sigmas[1:], strict=True)):
            for places in [everything] if i < warmup else parts:
                mine = torch.isin(owner, torch.tensor(places))
                seen[..., mine] = x[..., mine]
                positive, negative = (
                    velocity(seen, sigma, side, places) for side in ("positive", "negative")
                )
                found = negative + (positive - negative) * job.cfg
                x[..., mine] += (following - sigma) * found[..., mine]
    finally:
        wan.optimized_attention = original
    return x


SHAPES = {  # (shape of one row of video, of sound)
    "ltx-2": (Size((16, 3, 8, 6)), Size((8, 7, 16))),
    "minimax h3": (Size((24, 2, 8, 6)), Size((32, 2, 5))),
}


def sound_model(folder, name: str):
    """Writes a tiny model to a file and returns its ModelSpec."""
    import_comfyui_here()
    path, model = folder / f"{name}.safetensors", name.removesuffix(" h3")
    config = json.dumps({"transformer": config_of(model)}) if name == "ltx-2" else "{}"
    save_model(fill(build_tiny(model)), path, metadata={"config": config})
    return spec(path)


def sound_job(name: str, sampler: str = "euler") -> LoopJob:
    """Returns a job with two prompts of different lengths, for the sampling of the file's model."""
    shapes = [(1, *shape) for shape in SHAPES[name]]
    noise = random(1, 1, sum(shape.numel() for shape in SHAPES[name]), seed=1)
    beside = {"latent_shapes": ("CONDConstant", shapes)}
    if name == "minimax h3":
        conds = two_prompts(48, beside | {"minimax_payload": ("CONDConstant", {"seed": 3})})
    else:
        conds = two_prompts(96, beside | {"frame_rate": ("CONDConstant", 25)})
    return wan_job(sampler, noise=noise, latent=torch.zeros_like(noise), conds=conds)
