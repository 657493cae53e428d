"""The ModelPatcher of a network whose weights are in other processes: moves nothing, hands LoRAs on to the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import torch
from torch import Tensor

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.errors import RequestError
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.sidecar import pool
from ...parallel_backend.strategy import ModelShape
from ...parallel_backend.wire.weight_patches import WeightPatches
from ..host.calls import RunRecord
from ..host.memory import give_cache_back, held_on, make_room
from ..stock_run import StockRun
from .lora import weight_patches
from .options import (
    COMPUTE_OPTIONS,
    HOOKED_PATCHES,
    PATCHES,
    RECORD,
    REFERENCES_METHOD,
    SETTINGS,
    STEP_CACHE,
)
from .unsupported import refusal

if TYPE_CHECKING:
    from comfy.hooks import HookGroup, WeightHook
    from comfy.model_base import BaseModel
    from comfy.patcher_extension import PatcherInjection

    # By a parameter's key, or by (key, rows and columns of it): an adapter of comfy.weight_adapter, or (kind, tensors).
    PatchKey = str | tuple[object, ...]
    ComfyPatches = dict[PatchKey, object]


# Where a model of references keeps the way in which they have their places, which every call can name as well.
_REFERENCES_METHOD = ("diffusion_model.params.default_ref_method", "diffusion_model.default_ref_method")


def parallel_patcher(
    model: BaseModel, network: torch.nn.Module, settings: StrategySettings, computing: ComputeOptions
) -> StepwisePatcher:
    """The MODEL of `model` with a network whose calls the ranks answer. Starts nothing: ranks start with the first
    sampling."""
    model.diffusion_model = network
    patcher = StepwisePatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    patcher.model_options["transformer_options"] |= {SETTINGS: settings, COMPUTE_OPTIONS: computing}
    return patcher


def check_by_hand(settings: StrategySettings, shape: ModelShape) -> None:
    """Raises StrategyError for degrees that a person set and a model of this shape cannot be split by."""
    if settings.mode == "manual":
        settings.strategy.check(shape, len(resolve_devices(settings.devices)), settings.engine)


class StepwisePatcher(comfy.model_patcher.ModelPatcher):
    """To ComfyUI's memory manager a model that is loaded as long as ranks hold its weights, whole or not at all; to its
    nodes a MODEL that says what it cannot do yet."""

    _stock_run: StockRun | None = None

    def pre_run(self) -> None:
        """A sampler begins; where it is none of the pack's, nobody records its run yet."""
        super().pre_run()
        self._hooked: dict[object, WeightPatches] = {}  # of this run, by hooks and their strengths
        options, network = self.model_options["transformer_options"], self.model.diffusion_model
        if RECORD not in options:
            self._stock_run = StockRun(options.get(SETTINGS, StrategySettings()), network.file)
            network.record = self._stock_run.record
            network.record.cache_threshold = options.get(STEP_CACHE)
        record: RunRecord = options.get(RECORD) or network.record
        network.begin_run(record.cache_threshold or 0.0)

    def cleanup(self) -> None:
        super().cleanup()
        self._hooked = {}
        run, self._stock_run = self._stock_run, None
        network = self.model.diffusion_model
        record: RunRecord | None = self.model_options["transformer_options"].get(RECORD) or network.record
        changes = network.run_file.end()
        if record is not None:
            record.notes += changes
        network.end_run()
        pool.release_cache(network.spec)  # for what comes next: a VAE, perhaps
        if run is not None:
            run.end(whole=sys.exc_info()[0] is None)  # ComfyUI calls this in its `finally`

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        settings = self.model_options["transformer_options"].get(SETTINGS, StrategySettings())
        return self.model.diffusion_model.size_on(self.load_device, settings)

    def loaded_size(self) -> int:
        return held_on(self.load_device, self.model.diffusion_model.spec)

    def lowvram_patch_counter(self) -> int:
        return 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device

    def get_free_memory(self, device: torch.device) -> int:
        """Of which ComfyUI asks how many prompts may go into one call. The ranks' memory is the planner's to check, and
        what they keep for the next call looks taken from here: prompts would come one by one, and CFG parallelism have
        nothing to share out."""
        return sys.maxsize

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        give_cache_back(self.load_device, self.model.diffusion_model.spec)
        self.unpatch_model(self.offload_device, unpatch_weights=False)
        self.patch_model(load_weights=False)  # object patches such as ModelSamplingFlux
        return 0

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        freed = self.loaded_size()
        return freed if make_room(self.model.diffusion_model.spec, self.load_device) else 0

    def detach(self, unpatch_all: bool = True) -> BaseModel:
        # Clones share their object patches: one that is only collected must not take them from one that samples.
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            make_room(self.model.diffusion_model.spec, self.load_device)
        return self.model

    # What would change or read weights.

    def add_patches(
        self, patches: ComfyPatches, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[PatchKey]:
        self._check_keys(patches)
        added = super().add_patches(patches, strength_patch, strength_model)
        self.hand_on_patches()
        return added

    def hand_on_patches(self) -> None:
        """Has every model call take its LoRAs along. Raises RequestError for what the ranks cannot do."""
        found = weight_patches(self.patches, self.model.diffusion_model.file_parameters)
        self.model_options["transformer_options"][PATCHES] = found

    def _check_keys(self, patches: ComfyPatches) -> None:
        if not patches:
            model = self.model.diffusion_model.file.family.name
            raise RequestError(
                f"The LoRA changes nothing that this model has: none of its keys is known to ComfyUI for {model}. It "
                f"was made for another model; choose one for {model}."
            )

    def add_hook_patches(
        self,
        hook: WeightHook,
        patches: ComfyPatches,
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
    ) -> list[PatchKey]:
        """Of a LoRA that hooks of prompts schedule. Raises RequestError for one that the ranks cannot make."""
        if strength_patch:
            self._check_keys(patches)
        added = super().add_hook_patches(hook, patches, strength_patch, strength_model)
        weight_patches(self.hook_patches[hook.hook_ref], self.model.diffusion_model.file_parameters)
        return added

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        """Here are no weights to change: calls take along what hooks do to them."""
        self.current_hooks = hooks

    def apply_hooks(
        self, hooks: HookGroup | None, transformer_options: dict | None = None, force_apply: bool = False
    ) -> dict:
        options = super().apply_hooks(hooks, transformer_options, force_apply)
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            options[HOOKED_PATCHES] = self._patches_under(hooks)
        return options

    def _patches_under(self, hooks: HookGroup) -> WeightPatches:
        """The LoRAs of the whole run, then those of `hooks` at the strengths that they have now."""
        weights = hooks.get_type(comfy.hooks.EnumHookType.Weight)
        key = tuple((hook.hook_ref, hook.strength) for hook in weights)
        if key not in self._hooked:
            patches = {name: list(entries) for name, entries in self.patches.items()}
            for name, entries in self.get_combined_hook_patches(hooks).items():
                patches[name] = [*patches.get(name, ()), *entries]
            self._hooked[key] = weight_patches(patches, self.model.diffusion_model.file_parameters)
        return self._hooked[key]

    def set_injections(self, key: str, injections: list[PatcherInjection]) -> None:
        if injections:
            raise refusal("a LoRA in bypass mode or another injection", "load it with LoraLoaderModelOnly")
        super().set_injections(key, injections)

    def add_weight_wrapper(self, name: str, function: Callable[[Tensor], Tensor]) -> NoReturn:
        raise refusal("a wrapped weight")

    def add_object_patch(self, name: str, obj: object) -> None:
        if name in _REFERENCES_METHOD and not self.model.diffusion_model.own_loop:
            self.model_options["transformer_options"][REFERENCES_METHOD] = obj
            return
        if name.split(".")[0] == "diffusion_model":
            raise refusal(f"a replaced part of the network ({name})")
        if name == "manual_cast_dtype" and not self._computes_in(obj):
            raise refusal(f"another dtype to compute in ({obj})")
        super().add_object_patch(name, obj)

    def _computes_in(self, manual_cast: torch.dtype | None) -> bool:
        """Whether ranks that run ComfyUI's own module cast to this anyway; others choose their dtype themselves."""
        model = self.model
        return model.diffusion_model.own_loop or (
            (manual_cast or model.get_dtype()) == model.get_dtype_inference()
        )

    def deepclone_multigpu(self, *args: object, **kwargs: object) -> NoReturn:
        raise refusal(
            "ComfyUI's own split over several GPUs", "take its node out: this model is split already"
        )

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., object]) -> None:
        if key == "torch.compile":  # by TorchCompileModel and its like: compiled, but where the blocks are
            options = self.model_options["transformer_options"]
            options[COMPUTE_OPTIONS] = replace(
                options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE), compile="blocks"
            )
            return
        super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def clone(self, *args: object, **kwargs: object) -> StepwisePatcher:
        if kwargs.get("force_deepcopy"):
            raise refusal("a copy of its weights (such as training takes)", "train a model of stock loaders")
        return super().clone(*args, **kwargs)

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, Tensor]:
        # LoraSave asks so, for values; who wants names asks for all.
        if filter_prefix is not None:
            raise refusal("extracting a LoRA from its weights", "extract it from a model of stock loaders")
        return super().model_state_dict()

    def get_key_patches(self, filter_prefix: str | None = None) -> NoReturn:
        raise refusal("merging its weights into another model", "merge the files with stock loaders")

    def model_state_dict_for_saving(self, *args: object, **kwargs: object) -> NoReturn:
        raise refusal("saving the model", "copy its file instead")

    def state_dict_for_saving(self, *args: object, **kwargs: object) -> NoReturn:
        raise refusal("saving the model", "copy its file instead")
