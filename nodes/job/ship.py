"""Ships a sampling job whole: plans it, pickles it and gives what the ranks made of it."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.patcher_extension
import comfy.samplers
import folder_paths
import numpy
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...parallel_backend.devices import machine_of
from ...parallel_backend.errors import RankFailed, RequestError
from ...parallel_backend.job import reducers
from ...parallel_backend.job.payload import Head, ProcessFacts, SamplerRun, pack_facts, pack_payload
from ...parallel_backend.job.pickling import SentTensors, pickle_job
from ...parallel_backend.job.prints import OTHER_WEIGHTS
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.planner.history import record_run
from ...parallel_backend.planner.plan import job_from_latent
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.requests import SampleResult
from ...parallel_backend.sidecar.resume import ShippedRequest
from ...parallel_backend.wire.file_identity import read_identity
from ...parallel_backend.wire.payloads import Tensors
from ..host.calls import RunRecord, interrupted, plan_job, ranks_for, report_progress
from ..host.comfyui_flags import comfyui_root
from ..model.options import COMPUTE_OPTIONS, RECORD, SETTINGS, STEP_CACHE
from .model import JobPatcher
from .replaced import Packs, loaded_packs, replaced_by

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

_OWN = __name__.rsplit(".nodes.", 1)[0]
_FOLDERS = (
    "base_path",
    "models_dir",
    "folder_names_and_paths",
    "output_directory",
    "temp_directory",
    "input_directory",
)
_ELSEWHERE = (
    "Jobs that are shipped whole run on this computer's devices only, and {devices} are on other machines. Choose "
    "devices of this computer, or start ComfyUI without PARALLEL_SAMPLING_JOBS."
)
RecordRun = Callable[[StrategySettings, ModelFile], AbstractContextManager[RunRecord]]


class _SentToRanks:
    """The tensors and facts that the ranks of one start were sent."""

    def __init__(self) -> None:
        self.tensors = SentTensors()
        self.facts: bytes | None = None


class _Facts:
    """The facts of this process, made anew when a module has been imported."""

    def __init__(self) -> None:
        self._modules = -1
        self.packs: Packs = {}
        self.packed = b""

    def refresh(self) -> _Facts:
        if self._modules != len(sys.modules):
            self._modules, self.packs = len(sys.modules), loaded_packs()
            packs = {name: file for name, file in self.packs.items() if name != _OWN}
            folders = {name: _plain(getattr(folder_paths, name)) for name in _FOLDERS}
            facts = ProcessFacts(comfyui_root(), _OWN, packs, tuple(sys.path), folders)
            self.packed = pack_facts(facts)
        return self


_facts = _Facts()
# By holdings, with the mark of their ranks' start (RankHoldings.tensors is another one after a restart).
_sent: weakref.WeakKeyDictionary[Any, tuple[object, _SentToRanks | None]] = weakref.WeakKeyDictionary()


def _plain(value: Any) -> Any:
    """Makes folders by name plain lists and sets."""
    if not isinstance(value, dict):
        return value
    return {name: (list(paths), set(extensions)) for name, (paths, extensions) in value.items()}


class Ship:
    """The wrapper around a guider's `outer_sample`, the first of all. `record_run`: records a run for which no node of
    the pack has a record."""

    def __init__(self, record_run: RecordRun) -> None:
        self._record_run = record_run

    def __reduce__(self) -> tuple[Any, ...]:
        return (reducers.make_passing, ())

    def __call__(
        self,
        executor: WrapperExecutor,
        noise: Tensor,
        latent_image: Tensor,
        sampler: comfy.samplers.Sampler,
        sigmas: Tensor,
        denoise_mask: Tensor | None = None,
        callback: Callable[..., None] | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
        latent_shapes: Any = None,
    ) -> Tensor:
        guider = executor.class_obj
        patcher: JobPatcher = guider.model_patcher
        options = patcher.model_options["transformer_options"]
        settings = options.get(SETTINGS, StrategySettings())
        arguments = (noise, latent_image, sampler, sigmas, denoise_mask, seed)
        known: RunRecord | None = options.get(RECORD)
        new = self._record_run(settings, patcher.job_model.file) if known is None else nullcontext(known)
        with new as record:
            job = _ShippedJob(patcher, guider, executor.wrappers, arguments, latent_shapes, self)
            return job.run(settings, record, callback)


class _ShippedJob:
    """One job on its way."""

    def __init__(
        self,
        patcher: JobPatcher,
        guider: comfy.samplers.CFGGuider,
        wrappers: list[Any],
        arguments: tuple[Any, ...],
        latent_shapes: Any,
        ship: Ship,
    ) -> None:
        self._model, self._guider = patcher.job_model, guider
        self._options = patcher.model_options["transformer_options"]
        self._noise, self._latent, _, self._sigmas, _, _ = arguments
        self._shapes = latent_shapes
        self._facts = _facts.refresh()
        self._packs: tuple[str, ...] = ()
        self._sent_now: tuple[Any, _SentToRanks] | None = None
        self._run = SamplerRun(
            guider=guider,
            wrappers=[one for one in wrappers if one is not ship],
            arguments=arguments,
            latent_shapes=latent_shapes,
            replaced=replaced_by(self._facts.packs, comfyui_root(), _OWN),
            changes=self._model.outline.changes(),
            random_states=_random_states(patcher.load_device),
            cache_threshold=float(self._options.get(STEP_CACHE) or 0.0),
        )

    def run(
        self, settings: StrategySettings, record: RunRecord, callback: Callable[..., None] | None
    ) -> Tensor:
        """Returns the latent, on the device of the one that came."""
        plan = self._plan(settings)
        elsewhere = [device for device in plan.devices if machine_of(device)]
        if elsewhere:
            raise RequestError(_ELSEWHERE.format(devices=", ".join(elsewhere)))
        try:
            result = self._sample(plan, callback)
        except RequestError as error:
            _, found, names = str(error).partition(OTHER_WEIGHTS)
            if not found:
                raise
            # A node before Parallel Model has changed these in place: the ranks compute with what is here.
            self._model.outline.note_other_weights(names.split(","))
            self._run = replace(self._run, changes=self._model.outline.changes())
            result = self._sample(plan, callback)
        record_run(plan.devices, plan.job, result.info)
        notes = [*result.info.notes, *([self._model.verdict.words] if self._model.verdict.words else [])]
        record.stepwise_because = None
        record.add_run(plan, replace(result.info, notes=tuple(notes)))
        return result.latent.to(self._latent.device)

    def _plan(self, settings: StrategySettings) -> Plan:
        computing = self._options[COMPUTE_OPTIONS]
        model = CheckpointModel(self._model.file, self._model.spec.weight_dtype, computing)
        size = self._shapes[0] if self._shapes else tuple(self._noise.shape)
        job = job_from_latent(
            model,
            (self._noise.shape[0], *tuple(size)[1:]),
            text=_prompt_length(self._guider),
            has_cfg=float(getattr(self._guider, "cfg", 2.0)) != 1.0,
            steps=self._steps,
        )
        if self._run.cache_threshold > 0:  # PipeFusion, the other approximation, does not go with it
            settings = replace(settings, approximation="never")
        return plan_job(settings, replace(job, step_cache=self._run.cache_threshold > 0))

    @property
    def _steps(self) -> int:
        return max(len(self._sigmas) - 1, 1)

    def _sample(self, plan: Plan, callback: Callable[..., None] | None) -> SampleResult:
        def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
            if callback is not None:
                shown = self._latent[:1] if denoised is None else denoised.to(self._latent.device)
                callback(step - 1, shown, self._latent, steps)

        request = ShippedRequest(self._noise, self._steps, self._payload, self._run.cache_threshold)
        try:
            with ranks_for(plan) as (sidecar, placement):
                result = sidecar.sample(
                    self._model.spec,
                    request,
                    placement,
                    on_step=on_step,
                    on_phase=report_progress,
                    should_cancel=interrupted,
                    trials=plan.trials,
                    file=read_identity(self._model.spec.path),
                )
            if self._sent_now is not None:
                holdings, self._model.known_by = self._sent_now
                _sent[holdings] = (holdings.tensors, self._model.known_by)
            return result
        except (RankFailed, RequestError) as error:
            if not self._packs or str(error).startswith(OTHER_WEIGHTS):
                raise
            names = ", ".join(sorted(Path(name).name for name in self._packs))
            words = f"The job runs code of {names}."
            if isinstance(error, RankFailed):
                cause = f"{error.cause}. {words}"
                raise RankFailed(error.rank, cause, crashed=error.crashed, reason=error.reason) from error
            raise RequestError(f"{error} {words}") from error

    def _payload(self, holdings: Any) -> Tensors:
        # Until all goes well, nobody knows what the ranks have.
        start, sent = _sent.pop(holdings, (None, None))
        is_fresh = sent is None or start is not holdings.tensors
        if sent is None or is_fresh:
            sent = _SentToRanks()
        pickled = pickle_job(self._run, self._model.outline.known, sent.tensors, ModelPatcher)
        self._packs = tuple(
            name for name in self._facts.packs if name != _OWN and _is_used(name, pickled.modules)
        )
        is_known = self._model.known_by is sent
        head = Head(
            job=pickled.data,
            is_fresh=is_fresh,
            dropped=tuple(sent.tensors.take_dropped()),
            facts=None if sent.facts == self._facts.packed else self._facts.packed,
            packs=self._packs,
            mode=self._model.verdict.mode,
            prints=None if is_known else self._model.outline.file_prints(),
        )
        sent.facts = self._facts.packed
        self._sent_now = (holdings, sent)
        return pack_payload(head, pickled.tensors)


def _is_used(pack: str, modules: frozenset[str]) -> bool:
    return any(name == pack or name.startswith(f"{pack}.") for name in modules)


def _random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of torch, Python, numpy and, where models sample on a GPU, of its generator."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), on_device


def _prompt_length(guider: comfy.samplers.CFGGuider) -> int:
    """Counts the tokens of the first prompt that has any."""
    contexts = (cond.get("cross_attn") for conds in guider.conds.values() for cond in conds)
    return next((int(one.shape[-2]) for one in contexts if isinstance(one, Tensor) and one.ndim > 1), 0)
