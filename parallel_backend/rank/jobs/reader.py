"""Reads jobs in a rank, around the model that it holds and the tensors and packs that earlier jobs brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...engine.comm.groups import World
from ...errors import ParallelError, RequestError
from ...job.payload import Head, PickledJob, ProcessFacts
from ...job.pickling import PATCHER_STATE
from ...job.reducers import RankObjects
from ...job.restore import Original, Replaced
from ...job.tensors import OTHER_WEIGHTS, differing, print_of
from ...job.unpickling import unpack_facts, unpickle_job
from ...models.comfyui.attention_router import is_attention, reroute, routed_functions
from ...models.comfyui.jobs.mapped import MAPPED, MappedFiles
from ...models.comfyui.jobs.packages import Packages, quiet_server
from ...models.comfyui.jobs.patchers import find_unpatched, loaded_patchers, local_patcher, other_patcher
from ...wire.heartbeat import heartbeat
from ..outcome.errors import as_refusal
from .vaes import HeldVae

_SHARED_OUT = (
    "A node has changed the weight {name}, which shard_weights and tensor_degree cannot share out; set shard_weights "
    "to off and tensor_degree to 1."
)


class PatchedModel:
    """A model that a rank holds with a ModelPatcher, in which jobs refer to modules and weights by name, and the state
    of its modules when it was loaded. `is_shared_out`: True if each rank has a part of its weights; `originals`: the
    weights of its file; `buffers`: its network's, as ComfyUI has built them."""

    is_shared_out = False
    originals: Mapping[str, Tensor] = {}
    buffers: Mapping[str, Tensor] = {}

    def __init__(self, patcher: Any) -> None:
        self.patcher = patcher
        self.original = Original(self.base)
        self._loaded: list[object] = []

    @property
    def base(self) -> Any:
        return self.patcher.model

    def hold_loaded(self) -> None:
        """Holds the job's patchers that ComfyUI lists as loaded, until the next job. ComfyUI reports a model without
        its patcher as a leak, collects all garbage before each load, and fails if a ControlNet asks what is loaded."""
        self._loaded = loaded_patchers(self.base)

    def find(self, word: tuple[Any, ...]) -> Any:
        """Returns the module or weight that a pickle names."""
        return self.base if word[0] == "base" else find_unpatched(self.patcher, *word)


class JobReader:
    """Reads jobs, and keeps the tensors, packs and mapped files that later jobs refer to."""

    def __init__(
        self,
        world: World,
        facts_here: Callable[[ProcessFacts], ProcessFacts] = lambda facts: facts,
        check_packs: Callable[[ProcessFacts, Head], None] = lambda facts, head: None,
    ) -> None:
        """`facts_here`: translates the facts of ComfyUI's process into those of this rank's machine; `check_packs`:
        raises RequestError if this machine lacks the job's packs."""
        self._world, self._facts_here, self._check_packs = world, facts_here, check_packs
        self._facts: ProcessFacts | None = None
        self._tensors: dict[int, Tensor] = {}
        self._packages: Packages | None = None
        self._mapped = MappedFiles(print_of)

    @property
    def packages(self) -> Packages:
        assert self._packages is not None, "a job was read with them"
        return self._packages

    def read(self, head: Head, new: Mapping[int, Tensor], held: PatchedModel | HeldVae | None) -> PickledJob:
        """Returns the job. `held`: the model that it refers to, None for a job that brings one. Raises ParallelError on
        this rank alone."""
        if head.is_fresh:
            self._tensors.clear()
        for number in head.dropped:
            self._tensors.pop(number, None)
        self._tensors |= new
        try:
            return self._read(head, held)
        except Exception as failure:
            if isinstance(failure, ParallelError):
                raise
            raise as_refusal(failure) from failure

    def _read(self, head: Head, held: PatchedModel | HeldVae | None) -> PickledJob:
        if head.facts is not None:
            self._facts = self._facts_here(unpack_facts(head.facts))
            self._packages = self._packages_of(self._facts)
        if self._packages is None or self._facts is None:
            raise RequestError("A job came before what the devices need to know of ComfyUI.")
        self._check_packs(self._facts, head)
        self._packages.import_packs(head.packs)
        model = held if isinstance(held, PatchedModel) else None
        if model is not None and head.prints is not None:
            differing_weights = differing({**model.originals, **model.buffers}, head.prints)
            if differing_weights:
                raise RequestError(OTHER_WEIGHTS + ",".join(differing_weights))
        job: PickledJob
        job, objects = unpickle_job(head.job, self._objects(held))
        self._mapped.forget_unused()
        if model is not None and model.is_shared_out:
            for one in job.changes:
                path = f"{one.path}.{one.name}"
                if one.kind == "parameter" and path not in model.buffers:
                    raise RequestError(_SHARED_OUT.format(name=path))
        return replace(job, replaced=[_rerouted(one) for one in job.replaced], objects=objects)

    def _objects(self, held: PatchedModel | HeldVae | None) -> RankObjects:
        mapped = self._mapped
        device = self._world.device

        def resolve(word: tuple[Any, ...]) -> Any:
            if word[0] == MAPPED:
                return mapped.find(*word[1:])
            if held is None:
                raise RequestError(f"A text encoder or VAE names {word[0]}, which no device has.")
            return held.find(word)

        return RankObjects(
            device=device,
            resolve=resolve,
            find_module=self.packages.find_module,
            local_patcher=lambda: (
                local_patcher(held.patcher, PATCHER_STATE)
                if isinstance(held, PatchedModel)
                else other_patcher(device)
            ),
            other_patcher=lambda: other_patcher(device),
            server=quiet_server,
            stored=mapped.find_tensor,
            replaced=routed_functions(),
            tensors=self._tensors,
        )

    def _packages_of(self, facts: ProcessFacts) -> Packages:
        ranks = range(self._world.world_size)
        return Packages(
            facts.comfyui,
            facts.pack_name,
            facts.packs,
            facts.search_path,
            facts.folders,
            lambda: heartbeat.inside("the agreement on a job", ranks),
        )


def _rerouted(one: Replaced) -> Replaced:
    """Routes an attention function that a pack has put into a module through our router."""
    is_comfyuis = one.module.startswith("comfy.") and not one.path
    if not is_comfyuis or not is_attention(one.name) or not callable(one.value):
        return one
    return replace(one, value=reroute(one.name, one.value))
