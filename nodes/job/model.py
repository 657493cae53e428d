"""A MODEL whose jobs run on the ranks: ComfyUI's own patcher over the loader's parameters, which it never moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch
from torch import Tensor, nn

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.errors import DeviceError, RequestError, StrategyError
from ...parallel_backend.models.comfyui.model_file import ComfyUIModelFile
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.models.proof.states import UNKNOWN, ClassVerdict
from ...parallel_backend.options import ComputeOptions
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.requests import ModelSpec
from ..host.calls import COMPUTE_OPTIONS, SETTINGS, errors_as_comfyuis, interrupted, refusal, report_progress
from ..host.comfyui_flags import comfyui_root
from ..host.memory import give_cache_back, held_on, make_room, size_on, watch
from ..host.prompt_links import running_node
from ..model.class_verdict import ensure_verdict
from ..model.facts import count_facts
from ..model.mapped import map_weights
from .lora_checks import check_patches
from .outline import Outline

_OUTER_SAMPLE = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
_KEY = "parallel"
_COMPILE = "torch.compile"  # wrapper key of nodes that compile a model


class SharedByClones:
    """The state that all clones of a patcher share."""

    def __init__(self) -> None:
        self._clones: weakref.WeakSet[WeightlessPatcher] = weakref.WeakSet()
        self._loaded: Callable[[], WeightlessPatcher | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def add(self, patcher: WeightlessPatcher) -> None:
        self._clones.add(patcher)

    def load(self, patcher: WeightlessPatcher) -> None:
        """Notes the clone that ComfyUI loaded last: calls outside of samplers use its patches."""
        self._loaded = weakref.ref(patcher)

    @property
    def loaded(self) -> Any:
        """The clone that ComfyUI loaded last, or any other; None if none is left."""
        return self._loaded() or next(iter(self._clones), None)


class WeightlessPatcher(comfy.model_patcher.ModelPatcher):
    """A patcher without weights, which ranks hold: to ComfyUI's memory manager it is always loaded as a whole."""

    def become(self, model: nn.Module) -> None:
        """Makes this patcher, the clone of a stock one, a patcher of `model`, which ComfyUI has not loaded."""
        self.model, self.parent = model, None
        self.backup, self.backup_buffers, self.object_patches_backup = {}, {}, {}
        self.pinned, self.hook_backup = set(), {}
        self.load_device = comfy.model_management.get_torch_device()

    def is_dynamic(self) -> bool:
        return False

    def lowvram_patch_counter(self) -> int:
        return 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device


class ShippedModel(SharedByClones):
    """The state of a MODEL. `plan`: of its latest job; `known_by`: the record (ship.py) of what was sent to the ranks
    that have compared their weights with its prints; `patches_here`: False while ComfyUI loads it for a job, whose
    patches are applied only in the ranks."""

    def __init__(
        self, spec: ModelSpec, verdict: ClassVerdict, file: ComfyUIModelFile, outline: Outline
    ) -> None:
        super().__init__()
        self.spec, self.verdict, self.file, self.outline = spec, verdict, file, outline
        self.plan: Plan | None = None
        self.known_by: object = None
        self.patches_here = True

    @cached_property
    def mapped(self) -> Any:
        """ComfyUI's model over the mapped file, for nodes that ask for weights."""
        return map_weights(self.spec)


class JobPatcher(WeightlessPatcher):
    """A patcher that looks loaded to ComfyUI's memory manager while ranks hold its weights. Loading moves none of them.
    The rest is ComfyUI's own patcher."""

    job_model: ShippedModel
    catch: Callable[..., Any]  # the wrapper that sends jobs to the ranks
    made_by: str | None = None  # id of the node that cloned it and added what its parent does not have
    made_from: Callable[[], comfy.model_patcher.ModelPatcher | None]  # the patcher before Parallel Model

    def clone(self, *args: Any, **kwargs: Any) -> JobPatcher:
        if kwargs.get("force_deepcopy"):
            raise refusal("a copy of its weights (such as training takes)", "train a model of stock loaders")
        found: JobPatcher = super().clone(*args, **kwargs)
        found.job_model, found.catch, found.made_from = self.job_model, self.catch, self.made_from
        found.made_by = running_node()
        found.job_model.add(found)
        return found

    def register_all_hook_patches(
        self,
        hooks: comfy.hooks.HookGroup,
        target_dict: dict,
        model_options: dict | None = None,
        registered: comfy.hooks.HookGroup | None = None,
    ) -> None:
        """Keeps the wrapper that ships the job in front: hooks of prompts bring wrappers of their own."""
        super().register_all_hook_patches(hooks, target_dict, model_options, registered)
        if model_options is not None:
            wrappers = model_options["transformer_options"].setdefault("wrappers", {})
            others = {key: value for key, value in wrappers.get(_OUTER_SAMPLE, {}).items() if key != _KEY}
            wrappers[_OUTER_SAMPLE] = {_KEY: [self.catch], **others}

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        give_cache_back(self.load_device, self.job_model.spec)
        self.unpatch_model(self.offload_device, unpatch_weights=False)
        if self.job_model.patches_here:
            self.patch_model(load_weights=False)
        self.job_model.load(self)
        return 0

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        freed = self.loaded_size()
        return freed if make_room(self.job_model.spec, self.load_device) else 0

    def model_size(self) -> int:
        settings = self.model_options["transformer_options"].get(SETTINGS, StrategySettings())
        model = self.job_model
        return max(1, size_on(self.load_device, model.spec, model.file, settings, model.plan))  # a divisor

    def loaded_size(self) -> int:
        return held_on(self.load_device, self.job_model.spec)

    def detach(self, unpatch_all: bool = True) -> Any:
        # Clones share their object patches: one that is garbage-collected must not remove them from one that samples.
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            make_room(self.job_model.spec, self.load_device)
        return self.model

    def add_patches(self, patches: dict, strength_patch: float = 1.0, strength_model: float = 1.0) -> list:
        self._check(patches, may_enlarge=True)
        added: list = super().add_patches(patches, strength_patch, strength_model)
        return added

    def add_hook_patches(
        self, hook: Any, patches: dict, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list:
        if strength_patch:
            self._check(patches)
        added: list = super().add_hook_patches(hook, patches, strength_patch, strength_model)
        return added

    def _check(self, patches: dict, *, may_enlarge: bool = False) -> None:
        if not patches:
            model = self.job_model.file.family.name
            raise RequestError(
                f"The LoRA changes nothing that this model has: none of its keys is known to ComfyUI for {model}. It "
                f"was made for another model; choose one for {model}."
            )
        check_patches(patches, dict(self.model.named_parameters()), may_enlarge=may_enlarge)

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None:
        if key == _COMPILE:  # from TorchCompileModel and similar nodes: the ranks compile
            compile_blocks(self)
            return
        super().add_wrapper_with_key(wrapper_type, key, wrapper)

    # Methods that read weights: this process has them if ComfyUI's own loader read them, else in the mapped file.

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, Tensor]:
        found: dict[str, Tensor]
        patcher = None if filter_prefix is None else self._over_file()  # without a prefix only names count
        if patcher is None:
            found = super().model_state_dict(filter_prefix)
            return found
        found = patcher.model_state_dict(filter_prefix)
        for key in found.keys() & self.patches.keys():
            if not hasattr(patcher.model.get_submodule(key.rpartition(".")[0]), "comfy_cast_weights"):
                found[key] = patcher.patch_weight_to_device(key, self.load_device, return_weight=True)
        return found

    def get_key_patches(self, filter_prefix: str | None = None) -> dict:
        found: dict = self._reader.get_key_patches(filter_prefix)
        return found

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        return self._reader.patch_weight_to_device(key, *args, **kwargs)

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        return self._reader.model_state_dict_for_saving(*args, **kwargs)

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        return self._reader.state_dict_for_saving(*args, **kwargs)

    @property
    def _reader(self) -> Any:
        found = self._over_file()
        return super() if found is None else found

    def _over_file(self) -> comfy.model_patcher.ModelPatcher | None:
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            return None
        found = comfy.model_patcher.ModelPatcher(self.job_model.mapped, self.load_device, self.offload_device)
        found.patches = self.patches
        return found

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal(
            "ComfyUI's own split over several GPUs", "take its node out: this model is split already"
        )


def _verdict_on(module: nn.Module, settings: StrategySettings) -> ClassVerdict:
    """Returns the verdict on a network's class. Tests new sources, which takes seconds, only if tokens or blocks may be
    split. Any degree set by hand may split them: one that a request gives no work becomes Ulysses."""
    if not _may_split_inside(settings):
        return UNKNOWN
    with errors_as_comfyuis():
        return ensure_verdict(comfyui_root(), type(module).__name__, report_progress, interrupted)


def _may_split_inside(settings: StrategySettings) -> bool:
    if settings.mode == "manual":
        return settings.strategy.world_size > 1
    try:
        return len(resolve_devices(settings.devices)) > 1
    except DeviceError:  # planning reports it
        return False


def check_by_hand(settings: StrategySettings, file: ModelFile, verdict: ClassVerdict) -> None:
    """Raises StrategyError for degrees set by hand by which this model cannot be split."""
    if settings.mode != "manual":
        return
    try:
        settings.strategy.check(file.shape, len(resolve_devices(settings.devices)), settings.engine)
    except StrategyError as error:
        if not verdict.words:
            raise
        raise StrategyError(f"{error}\nThe reason: {verdict.words}.", problems=error.problems) from None


def compile_blocks(patcher: JobPatcher) -> None:
    """Has the ranks compile the blocks of the network."""
    options = patcher.model_options["transformer_options"]
    options[COMPUTE_OPTIONS] = replace(options[COMPUTE_OPTIONS], compile="blocks")


def make_job_patcher(
    source: comfy.model_patcher.ModelPatcher,
    spec: ModelSpec,
    settings: StrategySettings,
    computing: ComputeOptions,
    catch: Callable[..., Any],
) -> JobPatcher:
    """Returns a patcher for `source`, whose weights are `spec`'s, with everything that nodes have put on it. Reads no
    weights and starts no ranks. Raises RequestError, StrategyError or CheckpointError."""
    outline = Outline(source)
    verdict = _verdict_on(outline.pristine.diffusion_model, settings)
    file = count_facts(spec.path, outline.pristine, verdict)
    check_by_hand(settings, file, verdict)
    patcher: Any = source.clone(disable_dynamic=False) if source.is_dynamic() else source.clone()
    patcher.__class__ = JobPatcher
    patcher.become(outline.base)
    patcher.job_model = ShippedModel(spec, verdict, file, outline)
    patcher.catch, patcher.made_from, patcher.made_by = catch, weakref.ref(source), running_node()
    patcher.job_model.add(patcher)
    watch(outline.base.diffusion_model, spec)
    options = patcher.model_options.setdefault("transformer_options", {})
    options |= {SETTINGS: settings, COMPUTE_OPTIONS: computing}
    compiling = [by_key.pop(_COMPILE, None) for by_key in patcher.wrappers.values()]
    if any(compiling):  # requested by a node before Parallel Model
        compile_blocks(patcher)
    found: JobPatcher = patcher
    return found
