"""A job on its way to the ranks and back: it is pickled as a whole, and they return the result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import comfyui_version
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...parallel_backend.devices import machine_of
from ...parallel_backend.errors import RankFailed, RequestError
from ...parallel_backend.job.changes import NetworkChange
from ...parallel_backend.job.payload import (
    EncoderCall,
    HalfVae,
    Head,
    HeldTextEncoder,
    NetworkCall,
    PickledJob,
    ProcessFacts,
    SamplerRun,
    VaeCall,
    digest_of_code,
    pack_facts,
    pack_payload,
)
from ...parallel_backend.job.pickling import CannotBeSent, Known, Pickled, can_be_sent, pickle_job
from ...parallel_backend.job.restore import AS_IMPORTED, Replaced
from ...parallel_backend.job.state_changes import (
    generator_states,
    global_generators,
    store_changes,
    variables_by_number,
)
from ...parallel_backend.job.tensors import OTHER_WEIGHTS, FindInFile, SentTensors
from ...parallel_backend.job.torch_settings import torch_settings
from ...parallel_backend.planner.rules import Plan
from ...parallel_backend.requests import Placement, RunInfo, SampleResult
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.model_room import new_number
from ...parallel_backend.sidecar.resume import OnStep, ShippedRequest
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.wire.file_identity import read_identity
from ...parallel_backend.wire.payloads import Tensors
from ..host.calls import errors_as_comfyuis, interrupted, report_progress
from ..host.comfyui_flags import comfyui_root
from ..host.prompt_links import running_prompt
from ..model.mapped import mapped_words
from .culprit import with_culprit
from .file_tensors import FileTensors
from .model import JobPatcher
from .outline import Outline
from .pack_variables import (
    latest_variables,
    names_of,
    note_late_variables,
    note_latest,
    put_back,
    variables_of,
    was_set,
)
from .replaced import Packs, loaded_packs, note_values, replaced_by

_PACK = __name__.rsplit(".nodes.", 1)[0]
_UNSENT = (
    "The devices have the values that an import gives to {names}: nodes have set others, which cannot be sent, and the "
    "job's code uses them; its result may differ from one device."
)
_FOLDERS = (
    "base_path",
    "models_dir",
    "folder_names_and_paths",
    "output_directory",
    "temp_directory",
    "input_directory",
)


class _SentToRanks:
    """The tensors and facts that were sent to the ranks since their latest start."""

    def __init__(self) -> None:
        self.tensors = SentTensors()
        self.facts: bytes | None = None
        self.packs: frozenset[str] = frozenset()  # packs whose code they have imported


@functools.lru_cache(maxsize=1)
def _facts_with(modules: int) -> tuple[Packs, bytes]:
    """Returns the packs that ComfyUI has imported and the packed facts of this process, and notes new variables of
    packs and values of ComfyUI. `modules`: the number of imported modules; a new number makes all anew."""
    loaded = loaded_packs()
    note_values()
    note_late_variables(loaded)
    packs = {name: file for name, file in loaded.items() if name != _PACK}
    folders = {name: _plain(getattr(folder_paths, name)) for name in _FOLDERS}
    version = comfyui_version.__version__
    return loaded, pack_facts(ProcessFacts(comfyui_root(), version, _PACK, packs, tuple(sys.path), folders))


def replaced_now() -> tuple[list[Replaced], list[Replaced]]:
    """Returns (the code, the plain values) that packs have set in ComfyUI's modules."""
    return replaced_by(_facts_with(len(sys.modules))[0], comfyui_root(), _PACK)


def _plain(value: Any) -> Any:
    """Copies a dict of ComfyUI's folders as plain lists and sets; returns any other value unchanged."""
    if not isinstance(value, dict):
        return value
    return {name: (list(paths), set(extensions)) for name, (paths, extensions) in value.items()}


_alive: weakref.WeakSet[HeldByRanks] = weakref.WeakSet()
_alive_lock = threading.Lock()  # another thread encodes texts of waiting prompts


class HeldByRanks:
    """A text encoder or half a VAE that ranks hold under its `number` while this object is alive. `mark`: equal for two
    halves of a VAE that compute the same."""

    def __init__(self, mark: object = None) -> None:
        self.number, self.mark = new_number(), mark
        with _alive_lock:
            _alive.add(self)


def held_numbers() -> tuple[int, ...]:
    """Returns the numbers of all text encoders and halves of VAEs that ranks may hold."""
    with _alive_lock:
        return tuple(sorted(one.number for one in _alive))


class Shipment:
    """A job on its way to ranks. `outline`: of the model whose modules the job names, None if it names none; `device`:
    where ComfyUI would compute it; `own_file`: path of the file that the ranks read by themselves, "" for none."""

    def __init__(
        self,
        outline: Outline | None,
        work: SamplerRun | NetworkCall | EncoderCall | VaeCall,
        device: torch.device,
        cache_threshold: float = 0.0,
        own_file: str = "",
    ) -> None:
        self._own_file = own_file
        self._known, changes = ({}, []) if outline is None else _held_and_changed(outline)
        self._loaded_packs, self._facts = _facts_with(len(sys.modules))
        self._packs: tuple[str, ...] = ()
        self._new_packs = ""  # packs that the ranks have not imported yet, in words
        replaced, self._values = replaced_now()
        self._variables: list[Replaced] = []  # these values, and variables of packs that the job's code uses
        self._unsent = ""  # variables of packs that ranks cannot be given, in words
        self._sent_now: tuple[Any, _SentToRanks] | None = None
        self._is_elsewhere = False
        self._outline, self._device = outline, device
        self._objects: dict[int, Any] = {}  # that the job consists of, by number
        self._job = PickledJob(
            work=work,
            replaced=replaced,
            changes=changes,
            random_states=generator_states(device),
            settings=torch_settings(),
            cache_threshold=cache_threshold,
        )

    @contextlib.contextmanager
    def _sending(self, sidecar: Sidecar) -> Iterator[None]:
        """Wraps a request: adds the packs of its code to errors, and notes what was sent once it succeeded."""
        with sidecar.jobs:
            try:
                yield
            except (RankFailed, RequestError) as error:
                if not self._packs or str(error).startswith(OTHER_WEIGHTS):
                    raise
                names = ", ".join(sorted(Path(name).name for name in self._packs))
                words = f"The job runs code of {names}."
                if isinstance(error, RankFailed):
                    cause = f"{error.cause}. {words}"
                    raise RankFailed(error.rank, cause, crashed=error.crashed, reason=error.reason) from error
                raise RequestError(f"{error} {words}") from error
            if self._sent_now is not None:
                holdings, sent = self._sent_now
                holdings.sent = sent
                self._note_sent(sent)

    def _store(self, changes: Mapping[str, Tensor]) -> list[str]:
        """Stores what the job has changed for later ones in the objects of this process; returns notes."""
        if changes:
            modules = {} if self._outline is None else dict(self._outline.base.named_modules())
            store_changes({**self._objects, **global_generators(self._device), **modules}, changes)
        put_back(self._variables)
        return [_UNSENT.format(names=self._unsent)] if self._unsent else []

    def _note_sent(self, sent: _SentToRanks) -> None:
        """Called once the ranks have received everything that was sent with the job."""

    @functools.cached_property
    def _find_in_file(self) -> FindInFile:
        return FileTensors(running_prompt() or {}, self._own_file).find

    def _pack_module(self, holdings: Any, module: HeldTextEncoder | HalfVae) -> Tensors:
        """Returns the payload by which the ranks of these holdings load `module`, for this job and later ones."""
        return self._pack_one(holdings, replace(self._job, work=module, changes=()), {})

    def _pack(self, holdings: Any, follows: bool = False) -> Tensors:
        """Returns the payload of the job for the ranks of these holdings. `follows`: True if they have just loaded a
        module for it."""
        if follows and self._sent_now is not None:
            holdings.sent = self._sent_now[1]
        return self._pack_one(holdings, self._job, self._known)

    def _pack_one(self, holdings: Any, job: PickledJob, known: Known) -> Tensors:
        # Removed until the request succeeds: after a failure it is unknown what the ranks have.
        held, holdings.sent = holdings.sent, None
        sent: _SentToRanks = held or _SentToRanks()
        # Another machine has its own files, at other paths.
        words, _held = ({}, []) if self._is_elsewhere else mapped_words()
        find_in_file = None if self._is_elsewhere else self._find_in_file
        known = known | words
        try:
            pickled = self._pickled(job, known, sent.tensors, find_in_file)
        except CannotBeSent as error:
            raise self._refused(error, known) from error
        used = set(_with_parents({*pickled.modules, *(one.module for one in self._variables)}))
        self._packs = tuple(name for name in self._loaded_packs if name != _PACK and name in used)
        self._new_packs = ", ".join(Path(name).name for name in self._packs if name not in sent.packs)
        sent.packs |= set(self._packs)
        digests = {name: _digest(*self._loaded_packs[name]) for name in self._packs}
        head = Head(
            job=pickled.data,
            is_fresh=held is None,
            dropped=tuple(sent.tensors.take_dropped()),
            facts=None if sent.facts == self._facts else self._facts,
            packs=self._packs,
            digests=digests if self._is_elsewhere else {},
            **self._head(sent),
        )
        sent.facts = self._facts
        self._sent_now = (holdings, sent)
        return pack_payload(head, pickled.tensors)

    def _pickled(
        self, job: PickledJob, known: Known, sent: SentTensors, find_in_file: FindInFile | None
    ) -> Pickled:
        """Pickles the job with the variables that its code uses. Only the pickled code tells which of packs: those of
        the last job are tried first, so that most jobs are pickled once."""
        variables, tensors, found = latest_variables(), dict[str, Tensor](), list[Replaced]()
        for is_guess in (True, False, False):  # the code of functions in variables may name others
            there = self._sendable([*variables, *self._values], known)
            self._variables = [one if was_set(one) else replace(one, value=AS_IMPORTED) for one in there]
            whole = replace(job, replaced=[*job.replaced, *self._variables])
            pickled = pickle_job(whole, known, sent, ModelPatcher, find_in_file)
            tensors |= pickled.tensors
            found = variables_of(pickled.code)
            if names_of(found) == names_of(variables) or (
                not is_guess and names_of(found) < names_of(variables)
            ):
                break
            variables = found
        note_latest(found)
        self._objects = pickled.objects | variables_by_number([*job.replaced, *there])
        return replace(pickled, tensors=tensors)

    def _sendable(self, variables: list[Replaced], known: Known) -> list[Replaced]:
        """Returns the variables that ranks have, or that can be sent to them; notes the names of the others."""
        unsent = [
            one for one in variables if was_set(one) and not can_be_sent(one.value, known, ModelPatcher)
        ]
        self._unsent = ", ".join(f"{one.name} ({Path(one.module).name})" for one in unsent)
        return [one for one in variables if all(one is not other for other in unsent)]

    def _head(self, sent: _SentToRanks) -> dict[str, Any]:
        """Returns the fields of the head that describe the model."""
        return {"mode": "", "inputs": (), "prints": None}

    def _refused(self, error: CannotBeSent, known: Known) -> RequestError:
        return error


class ShippedJob(Shipment):
    """One job of a MODEL on its way to the ranks. `cache_threshold`: of the step cache, 0 without one; `on_latents`:
    gets the tensors of each step (payload.pack_step), None if a preview suffices."""

    def __init__(
        self,
        patcher: JobPatcher,
        work: SamplerRun | NetworkCall,
        cache_threshold: float = 0.0,
        on_latents: Callable[[Tensors], None] | None = None,
    ) -> None:
        self._patcher, self._model = patcher, patcher.job_model
        self._on_latents = on_latents
        super().__init__(
            self._model.outline, work, patcher.load_device, cache_threshold, self._model.spec.path
        )
        self._job = replace(self._job, sends_steps=on_latents is not None)

    def run(
        self,
        plan: Plan,
        sampled: Tensor,
        steps: int,
        on_step: OnStep | None = None,
    ) -> SampleResult:
        """Runs the job under `plan`. `sampled`: a tensor of its latent's shape; `steps`: 0 for a network call."""
        self._model.plan = plan
        self._is_elsewhere = any(map(machine_of, plan.devices))
        try:
            result = self._send(plan, sampled, steps, on_step)
        except RequestError as error:
            _, found, names = str(error).partition(OTHER_WEIGHTS)
            if not found:
                raise
            # A node before Parallel Model has changed these in place: send the ranks the values of this process.
            self._model.outline.note_other_weights(names.split(","))
            self._known, changes = _held_and_changed(self._model.outline)
            self._job = replace(self._job, changes=changes)
            result = self._send(plan, sampled, steps, on_step)
        notes = [note for note in (self._model.verdict.words, *self._store(result.changes)) if note]
        info: RunInfo = replace(result.info, notes=(*result.info.notes, *notes))
        return replace(result, info=info)

    def _send(self, plan: Plan, sampled: Tensor, steps: int, on_step: OnStep | None) -> SampleResult:
        request = ShippedRequest(
            sampled,
            max(steps, 1),
            self._pack,
            self._job.cache_threshold,
            is_call=steps == 0,
            imports=lambda: self._new_packs,
            trials=plan.trials,
            on_latents=self._on_latents,
        )
        with errors_as_comfyuis():
            sidecar = pool.get_sidecar(plan.devices)
            with self._sending(sidecar):
                return sidecar.sample(
                    self._model.spec,
                    request,
                    Placement(plan.strategy, plan.engine, plan.job.model.compute_options),
                    on_step=on_step,
                    on_phase=report_progress,
                    should_cancel=interrupted,
                    file=read_identity(self._model.spec.path),
                )

    def _head(self, sent: _SentToRanks) -> dict[str, Any]:
        is_known = self._model.known_by is sent
        return {
            "mode": self._model.verdict.mode,
            "inputs": astuple(self._model.file.inputs),
            "prints": None if is_known else self._model.outline.file_prints(),
        }

    def _note_sent(self, sent: _SentToRanks) -> None:
        self._model.known_by = sent

    def _refused(self, error: CannotBeSent, known: Known) -> RequestError:
        return with_culprit(error, self._patcher, known)


def _held_and_changed(outline: Outline) -> tuple[Known, list[NetworkChange]]:
    """Returns (the names of what the ranks hold, the changes to it). A weight that a node has changed is not named, so
    that the ranks get its values where a merge refers to it."""
    changes = [*outline.changes(), *outline.config()]
    changed = {("param", f"{one.path}.{one.name}") for one in changes if one.kind == "parameter"}
    known = outline.known
    return {key: name for key, name in known.items() if name not in changed} if changed else known, changes


_digest = functools.cache(digest_of_code)


def _with_parents(modules: Iterable[str]) -> Iterator[str]:
    """Yields each module's name and the names of the packages that it lies in."""
    for name in modules:
        yield from itertools.accumulate(name.split("."), "{}.{}".format)
