"""Looks at the pack's ranks from inside ComfyUI's process, and changes what they stand on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import comfy.model_management
from comfy.cli_args import args
from comfy_api.latest import io

from .category import CATEGORY

PATIENCE = 60.0  # s
FREE_MEMORY = comfy.model_management.get_free_memory


class TestRankStates(io.ComfyNode):
    """The states of the pack's groups of ranks in this process, in words."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRankStates",
            category=CATEGORY,
            inputs=[io.Int.Input("nonce", min=0, max=2**31, tooltip="another number, another look")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, nonce) -> io.NodeOutput:
        return io.NodeOutput(" ".join(rank_states()))


class TestUnload(io.ComfyNode):
    """Unloads a MODEL as ComfyUI does where another one needs room; tells whether ranks have it before,
    after an attempt under --highvram, and after one without: "held" or "gone", whatever else they hold."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUnload",
            category=CATEGORY,
            inputs=[io.Model.Input("model")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        spec = model.job_model.spec
        found = [_held(spec)]
        for highvram in (True, False):
            args.highvram = highvram
            model.partially_unload(model.offload_device, 1)
            found.append(_held(spec))
        return io.NodeOutput(" ".join(found))


class TestNoFreeMemory(io.ComfyNode):
    """Passes a LATENT on; from then on ComfyUI believes that its device has no memory left, or again what is true."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestNoFreeMemory",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.Boolean.Input("pretend")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent, pretend) -> io.NodeOutput:
        # No code of this pack's: that would go to the ranks with the next job.
        comfy.model_management.get_free_memory = Mock(return_value=1) if pretend else FREE_MEMORY
        return io.NodeOutput(latent)


class TestOtherPlatform(io.ComfyNode):
    """Passes a LATENT on; from then on the pack believes that it runs on Windows, or again where it does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestOtherPlatform",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.Boolean.Input("pretend")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent, pretend) -> io.NodeOutput:
        (name,) = (
            name for name in sys.modules if name.endswith(".parallel_backend.sidecar.group.supervisor")
        )
        sys.modules[name].sys = SimpleNamespace(platform="win32") if pretend else sys
        return io.NodeOutput(latent)


class TestUntilHeld(io.ComfyNode):
    """Passes a LATENT on once the pack's ranks hold a model of this file, as a slow tail of a prompt would."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUntilHeld",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.String.Input("file")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent, file) -> io.NodeOutput:
        deadline = time.monotonic() + PATIENCE
        while not any(model.path.endswith(file) for sidecar in _sidecars() for model in sidecar.models):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no ranks hold {file} after {PATIENCE:g} s")
            time.sleep(0.01)
        return io.NodeOutput(latent)


class TestUntilEarly(io.ComfyNode):
    """Passes a CONDITIONING on once so many texts of waiting prompts were encoded ahead by the devices."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUntilEarly",
            category=CATEGORY,
            inputs=[io.Conditioning.Input("conditioning"), io.Int.Input("count")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, count) -> io.NodeOutput:
        deadline = time.monotonic() + PATIENCE
        while sum(answer.done() for early in _early() for answer in list(early._answers.values())) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} texts were not encoded ahead after {PATIENCE:g} s")
            time.sleep(0.01)
        return io.NodeOutput(conditioning)


def rank_states() -> list[str]:
    """Of the pack's groups of ranks in this process."""
    return [sidecar.state.value for sidecar in _sidecars()]


def _held(spec) -> str:
    is_held = any(spec in sidecar.models and sidecar.state.value == "ready" for sidecar in _sidecars())
    return "held" if is_held else "gone"


def _sidecars() -> tuple:
    (pool,) = (m for name, m in list(sys.modules.items()) if name.endswith("parallel_backend.sidecar.pool"))
    return pool.all_sidecars()


def _early() -> list:
    """Returns the answers that the pack's text encoders were given ahead, by encoder."""
    (ship,) = (m for name, m in list(sys.modules.items()) if name.endswith(".nodes.job.ship"))
    return [one.early for one in list(ship._alive) if hasattr(one, "early")]


def fork_ranks(prompt: dict) -> dict:
    """Has the pack's ranks forked from a prepared process from the first prompt on (tests/support/forked_ranks.py)."""
    (name,) = (name for name in sys.modules if name.endswith(".parallel_backend.sidecar.group.supervisor"))
    supervisor = sys.modules[name]
    if supervisor.subprocess is subprocess:
        path = supervisor.PACK_ROOT / "tests" / "support" / "forked_ranks.py"
        spec = importlib.util.spec_from_file_location("forked_ranks", path)
        sys.modules["forked_ranks"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        supervisor.subprocess = module.ForkedSubprocess(supervisor)
    return prompt
