"""ParallelVAEEncode: VAEEncode's inputs; the rows of each image or video are encoded by all ranks, exactly."""

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
from .model.vae import encoder_weights


class ParallelVAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelVAEEncode",
            display_name="Parallel VAE Encode",
            category=CATEGORY,
            description="Encodes each image or video on several devices at once, without tiles or seams: every device "
            "takes some of its rows and about that part of the memory. For the VAEs of Flux, SD, SDXL, Wan, Qwen-Image "
            "and HunyuanVideo; any other is encoded by ComfyUI itself, and the report says so.",
            search_aliases=[
                "vae encode",
                "multi gpu vae",
                "encode video",
                "encode large image",
                "image to latent",
                "tiled vae",
                "distvae",
            ],
            inputs=[
                io.Image.Input("pixels", tooltip="The image to encode, or the frames of a video."),
                io.Vae.Input(
                    "vae", tooltip="The VAE to encode it with. Its encoder is sent to the devices once."
                ),
                devices_input(),
            ],
            outputs=[
                io.Latent.Output("latent", tooltip="The latent, as VAE Encode gives it."),
                io.String.Output("report", tooltip="Who encoded it, how long it took, and what was moved."),
            ],
        )

    validate_inputs = refuse_literals("pixels", "vae", "strategy")

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple:
        return fingerprint()

    @classmethod
    def execute(
        cls, pixels: Tensor, vae: comfy.sd.VAE, strategy: StrategySettings | None = None
    ) -> io.NodeOutput:
        check_links(pixels=pixels, vae=vae, strategy=strategy)
        begun = time.perf_counter()
        try:
            latent, lines = _on_ranks(vae, pixels, strategy or default_settings())
        except CannotBeSplit as reason:
            report_progress(f"encoding in ComfyUI: {reason}")
            latent = vae.encode(pixels)
            lines = [f"encoded by: ComfyUI's own VAE encode, on one device, because {reason}"]
        lines.append(f"in all: {time.perf_counter() - begun:.3f} s")
        report_progress(lines[0])
        return io.NodeOutput({"samples": latent}, "\n".join(lines))


def _on_ranks(vae: comfy.sd.VAE, pixels: Tensor, settings: StrategySettings) -> tuple[Tensor, list[str]]:
    """The latent as VAE.encode gives it, and the lines of the report. Raises CannotBeSplit where the ranks cannot."""
    weights = splittable(encoder_weights, vae)
    inputs = _as_network_takes(vae, pixels)
    sidecar, shares, notes = choose_ranks(settings)
    make_room(vae.memory_used_encode((1, *inputs.shape[1:]), vae.vae_dtype), sidecar)
    progress = comfy.utils.ProgressBar(1)
    try:
        with errors_as_comfyuis():
            result = sidecar.encode(
                weights,
                inputs,
                shares,
                on_step=lambda step, steps: progress.update_absolute(step, steps),
                on_phase=report_progress,
                should_cancel=interrupted,
            )
    except PlatformError as error:
        raise CannotBeSplit(str(error)) from error
    except comfy.model_management.OOM_EXCEPTION as error:  # ComfyUI cuts what is too large into tiles
        raise CannotBeSplit(f"memory ended on the devices: {error}") from error
    dtype = vae.vae_output_dtype() if hasattr(vae, "vae_output_dtype") else torch.float32
    latent = result.latent.to(device=vae.output_device, dtype=dtype)
    frames = inputs.shape[2] if inputs.ndim == 5 else 1
    lines = report_lines("encoded", sidecar.devices, result.info, len(inputs), frames, ROWS)
    return latent, [*lines, *notes]


def _as_network_takes(vae: comfy.sd.VAE, pixels: Tensor) -> Tensor:
    """IMAGE [B, H, W, 3] in 0..1 -> [B, 3, H, W] in -1..1 with its sides cropped to what the VAE divides by, as
    VAE.encode does; with a VAE of videos [1, 3, B, H, W], or [B, 3, 1, H, W] where that is for images all the same."""
    channels_first = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    if vae.latent_dim == 3 and channels_first.ndim < 5:
        alone = getattr(vae, "not_video", False)
        channels_first = channels_first.unsqueeze(2) if alone else channels_first.movedim(0, 1).unsqueeze(0)
    return vae.process_input(channels_first).to("cpu", vae.vae_dtype)
