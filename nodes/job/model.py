"""A MODEL whose jobs the ranks run whole: ComfyUI's own patcher over the loader's parameters, moving none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch

from ...parallel_backend.models.comfyui.model_file import ComfyUIModelFile
from ...parallel_backend.models.proof.states import Verdict
from ...parallel_backend.options import ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import ModelSpec
from ..host.memory import held_on
from ..model.facts import count_facts
from ..model.options import COMPUTE_OPTIONS, SETTINGS
from ..model.patcher import check_by_hand
from ..model.verdict import verdict_on
from .outline import Outline

# Jobs take this road instead of the one by which the pack takes them apart as data. Read once, as ComfyUI starts.
SHIPS_JOBS = os.environ.get("PARALLEL_SAMPLING_JOBS") == "1"
_OUTER_SAMPLE = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
_KEY = "parallel"


@dataclass(eq=False)
class ShippedModel:
    """A MODEL as its jobs need it. `known_by`: what the ranks were sent that have compared their weights with its
    prints."""

    spec: ModelSpec
    verdict: Verdict
    file: ComfyUIModelFile
    outline: Outline
    known_by: object = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShippedModel:
        return self


class JobPatcher(comfy.model_patcher.ModelPatcher):
    """Loading and unloading do nothing; all else is ComfyUI's."""

    job_model: ShippedModel
    ship: Callable[..., Any]  # the wrapper at which jobs leave this process

    def clone(self, *args: Any, **kwargs: Any) -> JobPatcher:
        found: JobPatcher = super().clone(*args, **kwargs)
        found.job_model, found.ship = self.job_model, self.ship
        return found

    def is_dynamic(self) -> bool:
        return False

    def register_all_hook_patches(
        self,
        hooks: comfy.hooks.HookGroup,
        target_dict: dict,
        model_options: dict | None = None,
        registered: comfy.hooks.HookGroup | None = None,
    ) -> None:
        """Hooks of prompts bring wrappers of their own; the one that ships the job stays the first."""
        super().register_all_hook_patches(hooks, target_dict, model_options, registered)
        if model_options is not None:
            wrappers = model_options["transformer_options"].setdefault("wrappers", {})
            others = {key: value for key, value in wrappers.get(_OUTER_SAMPLE, {}).items() if key != _KEY}
            wrappers[_OUTER_SAMPLE] = {_KEY: [self.ship], **others}

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        self.unpatch_model(self.offload_device, unpatch_weights=False)
        self.patch_model(load_weights=False)
        return 0

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        return 0

    def model_size(self) -> int:
        return 1  # ComfyUI divides by it

    def loaded_size(self) -> int:
        return held_on(self.load_device, self.job_model.spec)

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=False)
        return self.model


def make_job_patcher(
    source: comfy.model_patcher.ModelPatcher,
    spec: ModelSpec,
    settings: StrategySettings,
    computing: ComputeOptions,
    ship: Callable[..., Any],
) -> JobPatcher:
    """`source`, whose weights are `spec`'s, with all that nodes have put on it. Reads no weights and starts no ranks.
    Raises RequestError, StrategyError or CheckpointError."""
    outline = Outline(source)
    verdict = verdict_on(outline.pristine.diffusion_model, spec, settings)
    file = count_facts(spec.path, outline.pristine, verdict)
    check_by_hand(settings, file.shape)
    patcher: Any = source.clone(disable_dynamic=False) if source.is_dynamic() else source.clone()
    patcher.__class__ = JobPatcher
    patcher.model = outline.base
    patcher.job_model = ShippedModel(spec, verdict, file, outline)
    patcher.ship = ship
    patcher.backup, patcher.backup_buffers, patcher.object_patches_backup = {}, {}, {}
    patcher.pinned, patcher.hook_backup, patcher.parent = set(), {}, None
    patcher.load_device = comfy.model_management.get_torch_device()
    options = patcher.model_options.setdefault("transformer_options", {})
    options |= {SETTINGS: settings, COMPUTE_OPTIONS: computing}
    return patcher
