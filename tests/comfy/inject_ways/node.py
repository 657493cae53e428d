"""Nodes that change a model in one of WAYS, undo the change, and set how long the pack waits for ranks."""

from __future__ import annotations

import sys
import time
from typing import ClassVar

from comfy_api.latest import io

from .ways import WAYS, change, undo_all

CATEGORY = "parallel/testing"


class TestReach(io.ComfyNode):
    """A node that changes what a MODEL's network computes, in one of WAYS, until TestUndo runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestReach",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Combo.Input("way", options=list(WAYS))],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        return time.monotonic()  # always runs: the change must be made again even if no input differs

    @classmethod
    def execute(cls, model, way) -> io.NodeOutput:
        undo_all()
        return io.NodeOutput(change(model, way))


class TestUndo(io.ComfyNode):
    """A node that undoes TestReach's change once these LATENTs are computed, and passes a MODEL on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUndo",
            category=CATEGORY,
            inputs=[
                io.Model.Input("model"),
                io.Latent.Input("after"),
                io.Latent.Input("and_after", optional=True),
            ],
            outputs=[io.Model.Output()],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        return time.monotonic()

    @classmethod
    def execute(cls, model, after, and_after=None) -> io.NodeOutput:
        undo_all()
        return io.NodeOutput(model)


class TestPatience(io.ComfyNode):
    """A node that sets how many seconds the pack waits for silent ranks; 0 restores the usual deadlines."""

    before: ClassVar[dict[str, float]] = {}

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPatience",
            category=CATEGORY,
            inputs=[io.Float.Input("seconds", min=0.0, max=1000.0)],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, seconds) -> io.NodeOutput:
        (name,) = (name for name in sys.modules if name.endswith(".parallel_backend.wire.deadlines"))
        deadlines = sys.modules[name]
        for limit in ("FIRST_STEP", "LOAD_BASE", "STEP_FLOOR"):
            usual = cls.before.setdefault(limit, getattr(deadlines, limit))
            setattr(deadlines, limit, seconds or usual)
        return io.NodeOutput()
