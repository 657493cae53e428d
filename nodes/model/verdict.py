"""The verdict on the module of a MODEL: how far the ranks may share out its tokens with this version of ComfyUI."""

from __future__ import annotations

from torch import nn

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.errors import DeviceError
from ...parallel_backend.models.proof.states import UNKNOWN, ClassVerdict
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import ModelSpec
from ..host.calls import errors_as_comfyuis, interrupted, report_progress
from .class_verdict import ensure_verdict


def verdict_on(module: nn.Module, spec: ModelSpec, settings: StrategySettings) -> ClassVerdict:
    """Tests a class whose sources are new, which takes seconds, only where its tokens could be shared out at all, or
    its blocks laid out: by hand with any degree, since one that a request gives nothing to do becomes Ulysses."""
    return tested_verdict(type(module).__name__, spec) if _may_split_inside(settings) else UNKNOWN


def tested_verdict(class_name: str, spec: ModelSpec) -> ClassVerdict:
    """Of a class, however its tokens are shared out."""
    if spec.comfyui is None:
        return UNKNOWN
    with errors_as_comfyuis():
        return ensure_verdict(spec.comfyui.root, class_name, report_progress, interrupted)


def _may_split_inside(settings: StrategySettings) -> bool:
    if settings.mode == "manual":
        return settings.strategy.world_size > 1
    try:
        return len(resolve_devices(settings.devices)) > 1
    except DeviceError:  # planning says so, in its place
        return False
