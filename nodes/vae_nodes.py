"""Parallel VAE Decode and Encode: nodes that share out the rows of each image or video over the ranks, exactly. ComfyUI
computes what the ranks cannot share out, and the report says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy_api.latest import io
from torch import Tensor

from ..parallel_backend.errors import PlatformError
from ..parallel_backend.job.pickling import CannotBeSent
from ..parallel_backend.observability.prompt_phases import PHASES
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.sidecar.module_requests import ModuleAnswer
from .host.calls import errors_as_comfyuis, report_progress, running_prompt_id
from .host.settings import default_settings, fingerprint
from .job.vae import (
    CannotBeSplit,
    SharedOut,
    VaeShipment,
    as_sent,
    check_splittable,
    cuts_tiles,
    decode_here,
    refuse_other_kinds,
)
from .links import CATEGORY, OF_RANKS, check_links, refuse_literals, strategy_input
from .runs.report import as_shown, compare_with_one_device, phases_in_words
from .runs.run_ui import show_phases

_TRIED = "tried on one device, to know what sharing it out gains; the next ones go the faster way"
_ROWS = "rows of the latent on each: {} (exact, no tiles)"
_TILES = "tiles on each: {} (those that VAE Decode cuts for this VAE too)"


def _schema(verb: str, vaes: str, aliases: list[str], given: io.Input, gives: io.Output) -> io.Schema:
    """Returns the schema of the node that decodes or encodes. `verb`: Decode or Encode; `vaes`: the end of a sentence
    on the VAEs that it can share out, and on all others; `aliases`: beside those that both nodes have."""
    does = verb.lower()
    return io.Schema(
        node_id=f"ParallelVAE{verb}",
        display_name=f"Parallel VAE {verb}",
        category=CATEGORY,
        description=f"{verb}s each image or video on several devices at once, without tiles or seams: every device "
        f"holds the weights, takes some of the rows, and needs about that part of the other memory. For the VAEs of "
        f"{vaes}",
        search_aliases=[
            *(f"vae {does}", "multi gpu vae", f"{does} video", f"{does} large image"),
            *(*aliases, "tiled vae", "distvae"),
        ],
        inputs=[
            given,
            io.Vae.Input(
                "vae",
                tooltip=f"The VAE to {does} it with. Its {does}r is sent to the devices if they do not hold it.",
            ),
            strategy_input(OF_RANKS),
        ],
        outputs=[
            gives,
            io.String.Output("report", tooltip=f"Who {does}d it, how long it took, and what was moved."),
        ],
    )


class ParallelVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Decode",
            "Flux.1, Flux.2, SD1.x to SD3, SDXL, SVD, Wan, Qwen-Image, HunyuanImage 2.1, HunyuanVideo, LTX-Video, "
            "LTX-2, Cosmos 1, Mochi, CogVideoX and SeedVR2, and tiny ones; MiniMax H3's cuts tiles by itself, which "
            "are shared out. Any other is decoded by ComfyUI itself, and the report says so; those of 3D shapes are "
            "refused.",
            [],
            io.Latent.Input("samples", tooltip="The latent to decode."),
            io.Image.Output("image", tooltip="The decoded image."),
        )

    validate_inputs = refuse_literals("samples", "vae", "strategy")
    fingerprint_inputs = classmethod(fingerprint)

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
        settings = strategy or default_settings()
        return _computed("decod", lambda: _decode(vae, latent, settings), lambda: decode_here(vae, latent))


class ParallelVAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "Encode",
            "Flux.1, Flux.2, SD1.x to SD3, SDXL, SVD, Wan, Qwen-Image, HunyuanImage 2.1 and HunyuanVideo; any other is "
            "encoded by ComfyUI itself, and the report says so.",
            ["image to latent"],
            io.Image.Input("pixels", tooltip="The image to encode, or the frames of a video."),
            io.Latent.Output("latent", tooltip="The latent, as VAE Encode gives it."),
        )

    validate_inputs = refuse_literals("pixels", "vae", "strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(
        cls, pixels: Tensor, vae: comfy.sd.VAE, strategy: StrategySettings | None = None
    ) -> io.NodeOutput:
        check_links(pixels=pixels, vae=vae, strategy=strategy)
        settings = strategy or default_settings()
        return _computed(
            "encod", lambda: _encode(vae, pixels, settings), lambda: {"samples": vae.encode(pixels)}
        )


def _computed(
    stem: str, on_ranks: Callable[[], tuple[Any, list[str]]], here: Callable[[], Any]
) -> io.NodeOutput:
    """Returns the result of the ranks, or of ComfyUI if they cannot compute it, and the report. `stem`: of the verb."""
    started = time.perf_counter()
    try:
        result, lines = on_ranks()
    except CannotBeSplit as reason:
        report_progress(f"{stem}ing in ComfyUI: {reason}")
        result = here()
        lines = [f"{stem}ed by: ComfyUI's own VAE {stem}e, on one device, because {reason}"]
    lines.append(f"in all: {time.perf_counter() - started:.3f} s")
    lines += phases_in_words(running_prompt_id())
    show_phases(running_prompt_id())
    report_progress(lines[0])
    return io.NodeOutput(result, "\n".join(lines))


def _ask(vae: comfy.sd.VAE, inputs: Tensor, out: SharedOut, *, encodes: bool) -> ModuleAnswer:
    """Computes `inputs` on the ranks. Raises CannotBeSplit if they cannot, or lack the memory: ComfyUI can cut into
    tiles what is too large."""
    shipment = VaeShipment(vae, inputs, out.shares, encodes=encodes)
    progress = comfy.utils.ProgressBar(1)
    try:
        with errors_as_comfyuis():
            return shipment.run(out.sidecar, lambda step, steps: progress.update_absolute(step, steps))
    except CannotBeSent as error:
        raise CannotBeSplit(f"the devices cannot be given it: {error.problem}") from error
    except PlatformError as error:
        raise CannotBeSplit(str(error)) from error
    except comfy.model_management.OOM_EXCEPTION as error:
        if out.give_up_alone():
            return _ask(vae, inputs, out, encodes=encodes)
        raise CannotBeSplit(f"memory ended on the devices: {error}") from error


def _speed(run: ModuleAnswer, pictures: int, out: SharedOut) -> list[str]:
    """Records the seconds of each picture, and returns report lines that compare them with one device. Empty if there
    is only one device, or the picture was shared out and one device was never timed."""
    choice, seconds = out.choice, run.seconds / pictures
    alone, shared = choice.alone_seconds, choice.shared_seconds  # without this run's time
    out.record(seconds)
    if len(out.sidecar.devices) == 1:
        return []
    if not out.is_alone:
        if alone is None:
            return []
        PHASES.add_gain(running_prompt_id(), pictures * (as_shown(alone) - as_shown(seconds)))
        return [f"each: {seconds:.3g} s, {compare_with_one_device(seconds, alone)}"]
    if alone is None or shared is None:
        return [_TRIED]
    return [f"each: {seconds:.3g} s; the rows stay together, since shared out they took {shared:.3g} s"]


def _shared_out(
    vae: comfy.sd.VAE, inputs: Tensor, bytes_alone: float, settings: StrategySettings, *, encodes: bool
) -> tuple[Tensor, list[str]]:
    """Returns what the ranks compute from `inputs`, and the report's lines, with sizes in MiB and times in seconds; the
    first is shown under the node as well. `bytes_alone`: as in SharedOut. Raises CannotBeSplit if they cannot."""
    out = SharedOut(settings, vae, inputs, bytes_alone, encodes=encodes)
    run = _ask(vae, inputs, out, encodes=encodes)
    count, busy = len(inputs), sum(1 for rows in run.parts if rows)
    frames = 1 if inputs.ndim < 5 else inputs.shape[2] if encodes else len(run.value) // count
    what = f"{count} {'video' if frames > 1 else 'image'}{'s' if count > 1 else ''}"
    what += f" of {frames} frames" if frames > 1 else ""
    done = "encoded" if encodes else "decoded"
    took = _TILES if not encodes and cuts_tiles(vae) else _ROWS
    size = f"{max(run.bytes) / 2**20:.1f} MiB"
    lines = [
        f"{done} by: {busy} device{'s' if busy > 1 else ''}, {what} in {run.seconds:.3f} s",
        f"devices: {', '.join(run.devices)}",
        took.format(", ".join(map(str, run.parts))),
        f"VAE: {size}, loaded by the devices in {run.load_seconds:.3f} s"
        if run.is_new
        else f"VAE: {size}, was on the devices already",
        f"computed in: {run.compute_dtype}",
        f"moved between devices: {sum(run.bytes_sent) / 2**20:.2f} MiB",
    ]
    if any(run.peak_bytes):
        peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in run.peak_bytes)
        lines.append(f"peak memory for it on each: {peaks} MiB")
    return run.value, [*lines, *_speed(run, count, out), *out.notes]


def _decode(vae: comfy.sd.VAE, latent: Tensor, settings: StrategySettings) -> tuple[Tensor, list[str]]:
    """Returns an IMAGE [B, H, W, 3] in 0..1 and the report's lines. Raises CannotBeSplit if the ranks cannot."""
    if latent.ndim == 5 and getattr(vae, "latent_dim", 2) == 2:
        latent = latent[:, :, 0]  # as VAE.decode does
    check_splittable(vae, encodes=False)
    is_taken = latent.ndim == 2 + getattr(vae, "latent_dim", 2)  # the ranks refuse other shapes
    needed = vae.memory_used_decode((1, *latent.shape[1:]), vae.vae_dtype) if is_taken else 0.0
    image, lines = _shared_out(vae, as_sent(vae, latent).cpu(), needed, settings, encodes=False)
    # The network's output in -1..1 becomes pixels in 0..1 as in VAE.decode, in ComfyUI's dtype, on its device.
    pixels = image.to(device=vae.output_device, dtype=_output_dtype(vae), copy=True).movedim(-1, 1)
    return vae.process_output(pixels).movedim(1, -1), lines


def _encode(vae: comfy.sd.VAE, pixels: Tensor, settings: StrategySettings) -> tuple[dict, list[str]]:
    """Returns a LATENT as VAE.encode gives it, and the report's lines. Raises CannotBeSplit if the ranks cannot."""
    check_splittable(vae, encodes=True)
    inputs = _as_network_takes(vae, pixels)
    needed = vae.memory_used_encode((1, *inputs.shape[1:]), vae.vae_dtype)
    latent, lines = _shared_out(vae, inputs, needed, settings, encodes=True)
    return {"samples": latent.to(device=vae.output_device, dtype=_output_dtype(vae))}, lines


def _output_dtype(vae: comfy.sd.VAE) -> torch.dtype:
    found: torch.dtype = vae.vae_output_dtype() if hasattr(vae, "vae_output_dtype") else torch.float32
    return found


def _as_network_takes(vae: comfy.sd.VAE, pixels: Tensor) -> Tensor:
    """Converts an IMAGE [B, H, W, 3] in 0..1 to [B, 3, H, W] in -1..1, with its sides cropped to multiples of the VAE's
    factor, as VAE.encode does. A video VAE gets [1, 3, B, H, W]; with `not_video` it gets [B, 3, 1, H, W]."""
    channels_first = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    if vae.latent_dim == 3 and channels_first.ndim < 5:
        alone = getattr(vae, "not_video", False)
        channels_first = channels_first.unsqueeze(2) if alone else channels_first.movedim(0, 1).unsqueeze(0)
    return vae.process_input(channels_first).to("cpu", vae.vae_dtype)
