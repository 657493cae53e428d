"""ParallelVAEDecode: VAEDecode's inputs; the rows of each image or video are decoded by all ranks, exactly."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy_api.latest import io
from torch import Tensor

from ..parallel_backend.errors import PlatformError
from ..parallel_backend.planner.rules import StrategySettings
from .host.calls import errors_as_comfyuis, interrupted, report_progress
from .host.settings import default_settings, fingerprint
from .host.vae_ranks import ROWS, CannotBeSplit, choose_ranks, make_room, report_lines, splittable
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, devices_input
from .model.vae import as_sent, cuts_tiles, decoder_weights, refuse_other_kinds

_TILES = "tiles on each: {} (those that VAE Decode cuts for this VAE too)"


class ParallelVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelVAEDecode",
            display_name="Parallel VAE Decode",
            category=CATEGORY,
            description="Decodes each image or video on several devices at once, without tiles or seams: every device "
            "takes some of its rows and about that part of the memory. For the VAEs of Flux, SD, SDXL, SVD, Wan, "
            "Qwen-Image, HunyuanVideo, LTX, Cosmos, Mochi, CogVideoX and SeedVR2; MiniMax H3's cuts tiles by itself, "
            "which are shared out. Any other is decoded by ComfyUI itself, and the report says so.",
            search_aliases=[
                "vae decode",
                "multi gpu vae",
                "decode video",
                "decode large image",
                "tiled vae",
                "distvae",
            ],
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to decode."),
                io.Vae.Input("vae", tooltip="The VAE to decode it with. It is sent to the devices once."),
                devices_input(),
            ],
            outputs=[
                io.Image.Output("image", tooltip="The decoded image."),
                io.String.Output("report", tooltip="Who decoded it, how long it took, and what was moved."),
            ],
        )

    validate_inputs = refuse_literals("samples", "vae", "strategy")

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple:
        return fingerprint()

    @classmethod
    def execute(
        cls, samples: dict, vae: comfy.sd.VAE, strategy: StrategySettings | None = None
    ) -> io.NodeOutput:
        check_links(samples=samples, vae=vae, strategy=strategy)
        latent = samples["samples"]
        if latent.is_nested:
            latent = latent.unbind()[0]
        with errors_as_comfyuis():
            refuse_other_kinds(vae)
        begun = time.perf_counter()
        try:
            image, lines = _on_ranks(vae, latent, strategy or default_settings())
        except CannotBeSplit as reason:
            report_progress(f"decoding in ComfyUI: {reason}")
            image = vae.decode(latent)
            if image.ndim == 5:  # frames of a video become images, as VAEDecode has it
                image = image.reshape(-1, *image.shape[-3:])
            lines = [f"decoded by: ComfyUI's own VAE decode, on one device, because {reason}"]
        lines.append(f"in all: {time.perf_counter() - begun:.3f} s")
        report_progress(lines[0])
        return io.NodeOutput(image, "\n".join(lines))


def _on_ranks(vae: comfy.sd.VAE, latent: Tensor, settings: StrategySettings) -> tuple[Tensor, list[str]]:
    """IMAGE [B, H, W, 3] in 0..1 and the lines of the report. Raises CannotBeSplit where the ranks cannot."""
    if latent.ndim == 5 and getattr(vae, "latent_dim", 2) == 2:
        latent = latent[:, :, 0]  # as VAE.decode does
    weights = splittable(decoder_weights, vae)
    sidecar, shares, notes = choose_ranks(settings)
    if latent.ndim == 2 + getattr(vae, "latent_dim", 2):  # the ranks refuse any other in words
        make_room(vae.memory_used_decode((1, *latent.shape[1:]), vae.vae_dtype), sidecar)
    progress = comfy.utils.ProgressBar(1)
    sent = as_sent(vae, latent).cpu()
    try:
        with errors_as_comfyuis():
            result = sidecar.decode(
                weights,
                sent,
                shares,
                on_step=lambda step, steps: progress.update_absolute(step, steps),
                on_phase=report_progress,
                should_cancel=interrupted,
            )
    except PlatformError as error:
        raise CannotBeSplit(str(error)) from error
    except comfy.model_management.OOM_EXCEPTION as error:  # ComfyUI cuts what is too large into tiles
        raise CannotBeSplit(f"memory ended on the devices: {error}") from error
    frames = len(result.image) // len(sent) if sent.ndim == 5 else 1
    shared = _TILES if cuts_tiles(vae) else ROWS
    lines = report_lines("decoded", sidecar.devices, result.info, len(sent), frames, shared)
    return _as_comfyuis(vae, result.image), [*lines, *notes]


def _as_comfyuis(vae: comfy.sd.VAE, image: Tensor) -> Tensor:
    """Pixels as VAE.decode makes them of its network's output, -1..1 to 0..1, in ComfyUI's dtype and on its device."""
    dtype = vae.vae_output_dtype() if hasattr(vae, "vae_output_dtype") else torch.float32
    pixels = image.to(device=vae.output_device, dtype=dtype, copy=True).movedim(-1, 1)
    return vae.process_output(pixels).movedim(1, -1)
