"""What Parallel VAE Decode and Encode share: which ranks take a VAE, and the lines of a report on what they did."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import comfy.sd

from ...parallel_backend.devices import devices_of_a_run
from ...parallel_backend.errors import RequestError
from ...parallel_backend.machine.device_shares import read_shares
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import State
from ...parallel_backend.sidecar.module_requests import ModuleAnswer
from ...parallel_backend.sidecar.sidecar import Sidecar
from .aside import own_gpu, release_cache


class CannotBeSplit(Exception):
    """The reason, in a user's words, why the ranks cannot decode or encode it."""


def choose_ranks(settings: StrategySettings) -> tuple[Sidecar, tuple[float, ...], list[str]]:
    """The ranks to use, how much each takes, and notes: those that run and hold a model, or the chosen ones."""
    chosen = devices_of_a_run(settings.devices)
    wanted = chosen[: settings.strategy.world_size] if settings.mode == "manual" else chosen
    running = pool.running_within(chosen)
    if running is not None and running.state is State.READY and not running.models:
        running = None  # nothing but a VAE would be loaded again
    sidecar = running or pool.get_sidecar(wanted)
    share_of = dict(
        zip(chosen, read_shares(settings.device_shares, chosen), strict=False)
    )  # empty: equal shares
    shares = tuple(share_of[device] for device in sidecar.devices) if share_of else ()
    if sidecar.devices == wanted:
        return sidecar, shares, []
    used = len(sidecar.devices)
    note = (
        f"note: {used} of the {len(chosen)} devices chosen had running processes; they stay, with their model"
    )
    return sidecar, shares, [note]


def check_splittable(check: Callable[[comfy.sd.VAE], None], vae: comfy.sd.VAE) -> None:
    """Raises CannotBeSplit where `check(vae)` refuses."""
    try:
        check(vae)
    except RequestError as reason:
        raise CannotBeSplit(f"this VAE cannot be split: {reason}") from None


def make_room(bytes_alone: float, sidecar: Sidecar) -> None:
    """Has ComfyUI move its own models aside on each GPU of the ranks, as for what would take it `bytes_alone`."""
    found = {one.device for one in comfy.model_management.current_loaded_models}
    for device in map(own_gpu, sidecar.devices):
        if device in found:  # a question about the memory of any other takes some of it, for a context
            comfy.model_management.free_memory(bytes_alone / len(sidecar.devices), device)
    release_cache()


ROWS = "rows of the latent on each: {} (exact, no tiles)"


def report_lines(done: str, run: ModuleAnswer, images: int, frames: int, shared: str) -> list[str]:
    """One line per fact, the first also for under the node; sizes in MiB, times in seconds.

    `done`: decoded or encoded; `frames`: of each of the images, which are videos where there are several; `shared`:
    what the devices had of each, with a place for the numbers.
    """
    kind = "video" if frames > 1 else "image"
    what = f"{images} {kind}{'s' if images > 1 else ''}" + (f" of {frames} frames" if frames > 1 else "")
    busy = sum(1 for rows in run.parts if rows)
    lines = [
        f"{done} by: {busy} device{'s' if busy > 1 else ''}, {what} in {run.seconds:.3f} s",
        f"devices: {', '.join(run.devices)}",
        shared.format(", ".join(map(str, run.parts))),
    ]
    size = f"{max(run.bytes) / 2**20:.1f} MiB"
    lines.append(
        f"VAE: {size}, loaded by the devices in {run.load_seconds:.3f} s"
        if run.is_new
        else f"VAE: {size}, was on the devices already"
    )
    lines.append(f"computed in: {run.compute_dtype}")
    lines.append(f"moved between devices: {sum(run.bytes_sent) / 2**20:.2f} MiB")
    if any(run.peak_bytes):
        peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in run.peak_bytes)
        lines.append(f"peak memory for it on each: {peaks} MiB")
    return lines
