"""Nodes in ComfyUI's process that inspect the pack's ranks, and change what the pack finds around it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import comfy.model_management
import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io

from .node import node

PATIENCE = 60.0  # s
FREE_MEMORY = comfy.model_management.get_free_memory
_DEADLINES: dict[str, float] = {}  # the usual ones, by name


def _module(name: str) -> ModuleType:
    """Returns the pack's loaded module whose name ends with `name`."""
    (found,) = (module for known, module in list(sys.modules.items()) if known.endswith(name))
    return found


def _sidecars() -> tuple:
    return _module("parallel_backend.sidecar.pool").all_sidecars()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {PATIENCE:g} s it is not so that {what}")
        time.sleep(0.01)


@node("TestUnload")
def unload(model: io.Model) -> str:
    """Unloads a MODEL as ComfyUI does when another one needs room. Returns "held" or "gone" three times, for this model
    only: before, after an attempt with --highvram, and after one without."""
    spec = model.job_model.spec

    def held() -> str:
        is_held = any(spec in sidecar.models and sidecar.state.value == "ready" for sidecar in _sidecars())
        return "held" if is_held else "gone"

    found = [held()]
    for highvram in (True, False):
        args.highvram = highvram
        model.partially_unload(model.offload_device, 1)
        found.append(held())
    return " ".join(found)


@node("TestNoFreeMemory")
def no_free_memory(latent: io.Latent, pretend: bool) -> io.Latent:
    """Passes a LATENT on; from then on ComfyUI finds no free memory on its device (`pretend`), or the true amount."""
    # A Mock: a function of this pack would be sent to the ranks with the next job.
    comfy.model_management.get_free_memory = Mock(return_value=1) if pretend else FREE_MEMORY
    return latent


@node("TestUntilHeld")
def until_held(latent: io.Latent, file: str) -> io.Latent:
    """Passes a LATENT on once the pack's ranks hold a model of `file`, like a slow last node of a prompt."""
    _wait_until(
        lambda: any(model.path.endswith(file) for sidecar in _sidecars() for model in sidecar.models),
        f"ranks hold {file}",
    )
    return latent


@node("TestUntilEarly")
def until_early(conditioning: io.Conditioning, count: int) -> io.Conditioning:
    """Passes a CONDITIONING on once the devices have encoded `count` texts of waiting prompts in advance."""

    def encoded() -> int:
        encoders = [one.early for one in list(_module(".nodes.job.ship")._alive) if hasattr(one, "early")]
        return sum(answer.done() for early in encoders for answer in list(early._answers.values()))

    _wait_until(lambda: encoded() >= count, f"{count} texts were encoded ahead")
    return conditioning


@node("TestUntilFile")
def until_file(conditioning: io.Conditioning, file: str) -> io.Conditioning:
    """Passes a CONDITIONING on once `file` is in ComfyUI's output folder."""
    path = Path(folder_paths.get_output_directory()) / file
    _wait_until(path.exists, f"there is {file}")
    return conditioning


@node("TestReach", anew=True)
def reach(model: io.Model, way: str, after: io.Latent = None) -> io.Model:
    """Changes what a MODEL's network computes in one of the ways of the pack inject_ways, until TestUndo runs; once
    `after` is computed."""
    ways = _module("parallel_test_ways.ways")
    ways.undo_all()
    return ways.change(model, way)


@node("TestUndo", anew=True, is_output_node=True)
def undo(model: io.Model, after: io.Latent, and_after: io.Latent = None) -> io.Model:
    """Undoes TestReach's change once these LATENTs are computed, and passes a MODEL on."""
    _module("parallel_test_ways.ways").undo_all()
    return model


@node("TestPatience", is_output_node=True)
def patience(seconds: float):
    """Sets how many seconds the pack waits for silent ranks; 0 restores the usual deadlines."""
    deadlines = _module(".parallel_backend.wire.deadlines")
    for limit in ("FIRST_STEP", "LOAD_BASE", "STEP_FLOOR"):
        usual = _DEADLINES.setdefault(limit, getattr(deadlines, limit))
        setattr(deadlines, limit, seconds or usual)


def fork_ranks(prompt: dict) -> dict:
    """Makes the pack fork its ranks from a prepared process as of the first prompt (tests/support/forked_ranks.py)."""
    supervisor = _module(".parallel_backend.sidecar.group.supervisor")
    if supervisor.subprocess is subprocess:
        # If ComfyUI is a fork itself (tests/support/forked_comfyui.py).
        prepared = sys.modules.get("forked_ranks")
        if prepared is None:
            path = supervisor.PACK_ROOT / "tests" / "support" / "forked_ranks.py"
            spec = importlib.util.spec_from_file_location("forked_ranks", path)
            sys.modules["forked_ranks"] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            supervisor.subprocess = module.ForkedSubprocess(supervisor)
        else:
            supervisor.subprocess = prepared.ForkedSubprocess(supervisor)
            supervisor.subprocess.take_over(prepared.HERE)
    return prompt
