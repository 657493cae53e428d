"""Stands for a module of ComfyUI's own: the same class and structure, each call answered by the ranks.

It is the module's shadow with `RemoteModule` before its class, so whatever asks for its kind still finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import comfy.patcher_extension
import torch
from torch import Tensor, nn

from ...parallel_backend.models.comfyui.patches import ARGUMENT, held_bytes
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.models.proof.states import UNKNOWN, Verdict
from ...parallel_backend.models.tokens.cached_outputs import why_not_reused
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import (
    ModelSpec,
    ModuleCall,
    Placement,
    RunInfo,
    check_numbers,
    is_finite,
)
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.wire.arguments import Tree, map_tensors
from ...parallel_backend.wire.payloads import check_module_inputs
from ..host.calls import RunRecord, interrupted, report_progress
from ..host.memory import size_on, watch
from .arguments import ModuleSignature, method_call, module_call
from .call_reuse import CallReuse
from .options import RECORD, REFERENCES_METHOD, patches_of
from .patches import CarriedPatches, FrameCaches
from .plans import RunPlans
from .run_file import RunFile
from .shadow import shadow_of
from .unsupported import refusal
from .verdict import tested_verdict

# Methods with weights that ComfyUI's BaseModel calls beside forward, before a run starts.
_METHODS = ("preprocess_text_embeds",)
_REFERENCES = ("ref_latents", "ref_latent", "reference_latent")  # as ComfyUI's classes call them


class ModuleParameters:
    """The parameters of a module by the names that its LoRAs go by, which are the ranks' too."""

    def __init__(self, module: nn.Module) -> None:
        self._shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def key_of(self, name: str) -> str:
        return name

    def read(self, key: str) -> NoReturn:
        raise refusal(
            f"a LoRA of a kind that only ComfyUI computes (for {key})",
            "use one of the kinds LoRA, LoHa or LoKr",
        )


class RemoteModule(nn.Module):
    """`options`: the transformer_options of the run that is being prepared, for calls that bring none."""

    own_loop = False  # the ranks run ComfyUI's (loop.py)
    record: RunRecord | None = None  # of a run whose sampler brings none (patcher.py)
    reuse: CallReuse | None = None  # of the run, where a step cache is wanted

    spec: ModelSpec
    file: ModelFile
    file_parameters: ModuleParameters

    def stand_for(
        self,
        spec: ModelSpec,
        file: ModelFile,
        verdict: Verdict,
        own: type[nn.Module],
        options: Callable[[], dict],
    ) -> None:
        """Of a shadow of class `own`, on which `verdict` is."""
        self.spec, self.file, self.verdict = spec, file, verdict
        self.file_parameters = ModuleParameters(self)
        self.plans = RunPlans(spec, file)
        self.run_file = RunFile(spec.path)
        self._own = own
        self._signature = ModuleSignature(own)
        self._options = options
        self._patches = CarriedPatches()
        watch(self, spec)

    def begin_run(self, threshold: float) -> None:
        """`threshold`: of the step cache, 0 without one."""
        self.run_file.begin()
        self.reuse = None
        if threshold > 0:
            never = why_not_reused(self.class_name, self.verdict_on_blocks().mode)
            self.reuse = CallReuse(threshold, never)

    def end_run(self) -> None:
        self.record = self.reuse = None

    def verdict_on_blocks(self) -> Verdict:
        """Tested now where that was not needed to share out its tokens."""
        return tested_verdict(self.class_name, self.spec) if self.verdict == UNKNOWN else self.verdict

    @property
    def class_name(self) -> str:
        """Of the module that it stands for."""
        return self._own.__name__

    def size_on(self, device: torch.device, settings: StrategySettings) -> int:
        """Bytes of its weights on one of ComfyUI's devices, while ranks hold them."""
        return size_on(device, self.spec, self.file, settings, self.plans.latest)

    def forward(self, *args: object, **kwargs: object) -> Tensor | list[Tensor]:
        """As its class's: wrappers first, with the arguments as that one hands them over."""
        wrappers = comfy.patcher_extension.get_all_wrappers(
            comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, kwargs.get("transformer_options") or {}
        )
        if not wrappers:
            return self._forward_on_ranks(*args, **kwargs)
        args, kwargs = self._signature.positional(args, kwargs)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._forward_on_ranks, self, wrappers
        )
        return executor.execute(*args, **kwargs)

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        # Of this module alone: a Control-LoRA asks for that; who wants names asks for the whole model's.
        if not args and kwargs.get("destination") is None:
            raise refusal(
                "what computes with the model's own weights (such as a Control-LoRA)",
                "take a whole ControlNet instead",
            )
        return super().state_dict(*args, **kwargs)

    def _forward_on_ranks(self, *args: object, **kwargs: object) -> Tensor | list[Tensor]:
        args, kwargs = self._signature.by_name(args, kwargs)
        options = kwargs.get("transformer_options") or {}
        check_module_inputs(args[0], kwargs.get("context"), self.file.inputs)
        if REFERENCES_METHOD in options:
            kwargs = {"ref_latents_method": options[REFERENCES_METHOD]} | kwargs
        call = module_call(self.class_name, self.verdict, args, kwargs, self._patches)
        if self.reuse is not None:
            call = replace(call, reuse=self.reuse.of(call, options))
        latent = args[0] if isinstance(args[0], Tensor) else args[0][0]
        answer = self._on_ranks(
            call, tuple(latent.shape), _text_tokens(kwargs), options, reference_shapes(kwargs)
        )
        for found in _tensors(answer):
            if not is_finite(found):
                when = f"at timestep {_tensors(call.args[1])[0].max().item():.4g}"
                check_numbers(found, when, given=_tensors(call.args[0]))
        return map_tensors(answer, lambda tensor: tensor.to(latent.device))

    def method_on_ranks(self, method: str, args: tuple, kwargs: dict) -> Tree:
        """A call of another method, made before the run's first step."""
        call = method_call(method, args, kwargs)
        shape = (call.rows, self.file.latent_channels, 1, 1)
        answer = self._on_ranks(call, shape, args[0].shape[1], self._options())
        return map_tensors(answer, lambda tensor: tensor.to(args[0].device))

    def _on_ranks(
        self,
        call: ModuleCall,
        shape: tuple[int, ...],
        text: int,
        options: dict,
        references: Sequence[tuple[int, ...]] = (),
    ) -> Tree:
        record: RunRecord | None = options.get(RECORD, self.record)
        patches = patches_of(options)

        def run(sidecar: Sidecar, placement: Placement) -> tuple[Tree, RunInfo]:
            return sidecar.call(
                self.spec,
                call,
                placement,
                on_phase=report_progress,
                should_cancel=interrupted,
                patches=patches,
                file=self.run_file.identity,
            )

        answer, plan, info = self.plans.run(
            options,
            shape,
            text,
            run,
            references=references,
            patch_bytes=held_bytes(call.kwargs.get(ARGUMENT)),
            once=call.method != "forward",
            step_cache=self.reuse is not None,
        )
        if record is not None:
            record.why_whole = "" if self.reuse is None else self.reuse.why_whole
            said = (self.verdict.words,) if self.verdict.words else ()
            record.add_run(plan, replace(info, notes=(*info.notes, *said)))
        return answer


def remote_module(
    module: nn.Module, spec: ModelSpec, file: ModelFile, verdict: Verdict, options: Callable[[], dict]
) -> RemoteModule:
    """The stand-in for `module`. `verdict`: on its class. Raises RequestError for a module that other code has
    changed."""
    own = type(module)
    shadow = shadow_of(module)
    methods: dict[str, Callable] = {name: _remote_method(name) for name in _METHODS if hasattr(own, name)}
    if hasattr(own, "init_kv_caches"):
        methods |= {"init_kv_caches": _frame_caches, "init_crossattn_caches": _no_caches}
    shadow.__class__ = type(own.__name__, (RemoteModule, own), {"__module__": own.__module__, **methods})
    shadow.stand_for(spec, file, verdict, own, options)
    return shadow


def _remote_method(name: str) -> Callable[..., Tree]:
    def call(self: RemoteModule, *args: object, **kwargs: object) -> Tree:
        return self.method_on_ranks(name, args, kwargs)

    return call


def _frame_caches(
    self: RemoteModule, rows: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> FrameCaches:
    """In place of a causal model's: the ranks have them."""
    return FrameCaches(len(self.blocks), rows, tokens, dtype, self.patch_size)


def _no_caches(self: RemoteModule, rows: int, device: torch.device, dtype: torch.dtype) -> list[Tree]:
    return []


def _text_tokens(kwargs: dict) -> int:
    context = kwargs.get("context")
    return context.shape[-2] if isinstance(context, Tensor) and context.ndim > 1 else 0


def reference_shapes(kwargs: Mapping[str, Tree]) -> list[tuple[int, ...]]:
    """Of the latents of images that the model attends to beside its own."""
    given = [kwargs[name] for name in _REFERENCES if kwargs.get(name) is not None]
    return [tuple(latent.shape) for tree in given for latent in _tensors(tree)]


def _tensors(tree: Tree) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else list(tree)
