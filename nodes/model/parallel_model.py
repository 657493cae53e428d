"""A MODEL of any core loader as one whose calls the ranks answer: its shadow, with what nodes have put on it."""

from __future__ import annotations

import weakref

import comfy.model_base
import comfy.model_patcher
import comfy.patcher_extension
import comfy.utils

from ...parallel_backend.errors import StrategyError
from ...parallel_backend.models.proof.states import Verdict
from ...parallel_backend.options import ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import ModelSpec
from ...parallel_backend.strategy import ModelShape
from ..links import ParallelModel
from .arguments import refuse_model_options
from .facts import count_facts
from .module_network import remote_module
from .patcher import StepwisePatcher, check_by_hand, parallel_patcher
from .unsupported import refusal
from .verdict import verdict_on

_NETWORK = "diffusion_model"


def make_parallel(
    source: comfy.model_patcher.ModelPatcher,
    spec: ModelSpec,
    settings: StrategySettings,
    computing: ComputeOptions,
) -> ParallelModel:
    """`source`, whose weights are `spec`'s, over the devices. Reads no weights and starts no ranks; a ComfyUI that the
    pack does not know yet is tested once. Raises RequestError, StrategyError or CheckpointError."""
    _refuse_changes(source)
    module = source.model.diffusion_model
    verdict = verdict_on(module, spec, settings)
    file = count_facts(spec.path, source.model, verdict)
    _check(settings, file.shape, verdict)
    model = _shadow_model(source)

    held = weakref.ref(model)

    def options() -> dict:
        patcher = getattr(held(), "current_patcher", None)
        return {} if patcher is None else patcher.model_options["transformer_options"]

    network = remote_module(module, spec, file, verdict, options)
    patcher = parallel_patcher(model, network, settings, computing)
    _carry_over(source, patcher)
    return ParallelModel(spec, file, patcher)


def _check(settings: StrategySettings, shape: ModelShape, verdict: Verdict) -> None:
    """Raises StrategyError for degrees that a person set and this model cannot be split by."""
    try:
        check_by_hand(settings, shape)
    except StrategyError as error:
        if not verdict.words:
            raise
        raise StrategyError(f"{error}\nThe reason: {verdict.words}.", problems=error.problems) from None


def _shadow_model(source: comfy.model_patcher.ModelPatcher) -> comfy.model_base.BaseModel:
    """The same BaseModel without network and without state of a loaded one; what is patched into it right now, by
    whichever clone samples, is taken out again."""
    base = source.model
    shadow = type(base).__new__(type(base))
    shadow.__dict__.update(base.__dict__)
    for group in ("_parameters", "_buffers", "_modules"):
        shadow.__dict__[group] = dict(base.__dict__[group])
    del shadow._modules[_NETWORK]
    shadow.current_patcher = None
    shadow.current_weight_patches_uuid = None
    shadow.model_loaded_weight_memory = 0
    for name in ("dynamic_vbars", "dynamic_pins", "dynamic_patchers"):
        shadow.__dict__.pop(name, None)
    for name, original in source.object_patches_backup.items():
        if name.split(".")[0] != _NETWORK:
            comfy.utils.set_attr(shadow, name, original)
    return shadow


def _refuse_changes(source: comfy.model_patcher.ModelPatcher) -> None:
    """Raises RequestError for what a node before this one did and the ranks cannot do."""
    for effect, remedy, found in (
        ("a LoRA in bypass mode or another injection", "load it with LoraLoaderModelOnly", source.injections),
        ("a wrapped weight", "take it out", source.weight_wrapper_patches),
        (
            "models that belong to it (such as those of ComfyUI's own split over several GPUs)",
            "take that node out: this one splits the model",
            source.additional_models,
        ),
    ):
        if any(found.values()):
            raise refusal(effect, remedy)
    refuse_model_options(source.model_options.get("transformer_options", {}))


def _carry_over(source: comfy.model_patcher.ModelPatcher, patcher: StepwisePatcher) -> None:
    """What nodes have put on `source`: LoRAs, replaced objects, options, wrappers and callbacks."""
    own = patcher.model_options["transformer_options"]
    patcher.model_options = comfy.utils.deepcopy_list_dict(source.model_options)
    patcher.model_options["transformer_options"] = {
        **patcher.model_options.get("transformer_options", {}),
        **own,
    }
    for name, value in source.object_patches.items():
        patcher.add_object_patch(name, value)
    for kind, by_key in source.wrappers.items():
        for key, wrappers in by_key.items():
            for wrapper in wrappers:
                patcher.add_wrapper_with_key(kind, key, wrapper)
    for kind, by_key in source.callbacks.items():
        for key, callbacks in by_key.items():
            for callback in callbacks:
                patcher.add_callback_with_key(kind, key, callback)
    for key, attachment in source.attachments.items():
        cloned = getattr(attachment, "on_model_patcher_clone", None)
        patcher.attachments[key] = attachment if cloned is None else cloned()
    if source.patches:
        patcher.patches = {key: list(patches) for key, patches in source.patches.items()}
        patcher.patches_uuid = source.patches_uuid
        patcher.hand_on_patches()
    for callback in source.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_CLONE):
        callback(source, patcher)
