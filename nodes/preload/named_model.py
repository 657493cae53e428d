"""Finds the model that a loader node names before its prompt runs, and loads it ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...parallel_backend.errors import RequestError
from ...parallel_backend.observability.preview.form import SelectorInputs, read_request
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.requests import LoadInfo
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import State
from ...parallel_backend.strategy import ParallelStrategy
from ..host.calls import plan_by_rule
from ..host.memory import keep_ahead
from ..host.prompt_graph import Prompt, class_of, inputs_of, loader_before, with_those_before
from ..host.settings import default_settings
from ..job.model import JobPatcher
from ..loaders import over_file
from ..model.named_file import FILE_LOADERS, STOCK_LOADERS, demo_spec


def preload(prompt: Prompt, node: str, *, only_warm: bool = False) -> tuple[LoadInfo, tuple[str, ...]]:
    """Loads the model that the loader `node` names. Returns facts about the load, and the devices. `only_warm`: refuse
    if ranks would have to start. Raises ParallelError if it cannot be loaded; the ranks keep what they hold."""
    patcher, settings = named_model(prompt, node)
    model = patcher.job_model
    # Other jobs seldom place the weights differently; if one does, its prompt loads the model again.
    plan = plan_by_rule(settings, Job(CheckpointModel(model.file, model.spec.weight_dtype)))
    devices, strategy = plan.devices, plan.strategy
    warm = pool.running_within(devices) if settings.mode == "auto" else None
    if warm is not None and strategy.weights == ParallelStrategy():  # each device holds all weights
        devices = warm.devices
    if only_warm and not any(s.devices == devices and s.state is State.READY for s in pool.all_sidecars()):
        raise RequestError(f"No processes wait on {', '.join(devices)}.")
    info = pool.preload(devices, model.spec, strategy)
    keep_ahead(model.spec, patcher.model.diffusion_model)
    return info, devices


def named_model(prompt: Prompt, node: str) -> tuple[JobPatcher, StrategySettings]:
    """Returns the model that running the node would give, and the strategy that its sampler would use. Reads headers
    only. Raises RequestError if only a run of the prompt can tell."""
    if node not in prompt:
        raise RequestError(f"The prompt has no node {node}.")
    kind, inputs = prompt[node]["class_type"], prompt[node]["inputs"]
    settings = _settings_of(prompt, inputs.get("strategy")) or default_settings()
    is_behind = kind == "ParallelModel"
    if is_behind:  # without LoRAs: those come with the first prompt
        behind = loader_before(prompt, node)
        kind, inputs = class_of(prompt, behind), inputs_of(prompt, behind)
        if kind not in STOCK_LOADERS:
            raise RequestError(
                "Which file is behind this Parallel Model shows only when the prompt runs: no Load Diffusion Model or "
                "Load Checkpoint leads to it directly. Its first prompt loads it."
            )
    if kind == "ParallelDemoLoader":  # running the node would also make a text encoder and a VAE
        spec = demo_spec()
    elif kind in FILE_LOADERS and (is_behind or kind not in STOCK_LOADERS):
        loader = FILE_LOADERS[kind]
        dtype = _literal(inputs, "weight_dtype") if "weight_dtype" in inputs else next(iter(loader.options))
        spec = loader.find(str(_literal(inputs, loader.input)), dtype)
    else:
        raise RequestError(f"{kind} names no model for the devices.")
    return over_file(spec, settings), _settings_of(prompt, _samplers(prompt, node)) or settings


def _samplers(prompt: Prompt, node: str) -> object:
    """Returns the first strategy link of the nodes that this loader's PARALLEL_MODEL reaches; None without one."""
    others = (
        one for one in prompt if one != node and node in with_those_before(prompt, one, "parallel_model")
    )
    strategies = (inputs_of(prompt, one).get("strategy") for one in others)
    return next((strategy for strategy in strategies if strategy is not None), None)


def _settings_of(prompt: Prompt, link: object) -> StrategySettings | None:
    """Returns the settings of a linked Strategy Selector; None without a link. Raises RequestError for other nodes."""
    if not (isinstance(link, list) and len(link) == 2):
        return None
    selector = prompt.get(str(link[0]), {"class_type": "a node that is not there", "inputs": {}})
    if selector["class_type"] != "StrategySelector":
        raise RequestError(f"The strategy comes from {selector['class_type']}, which has to run first.")
    inputs = selector["inputs"]
    known = {one.name: _literal(inputs, one.name) for one in fields(SelectorInputs) if one.name in inputs}
    return read_request({"inputs": known}).inputs.settings()


def _literal(inputs: Mapping[str, Any], name: str) -> Any:
    """Returns the value of an input. Raises RequestError if another node gives it or it is missing."""
    value = inputs.get(name)
    if not isinstance(value, (str, int, float, bool)):
        raise RequestError(f"{name} comes from another node, which has to run first.")
    return value
