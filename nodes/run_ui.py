"""The traces of a run on ComfyUI's page: its report, which device did what, the candidates, for web/*.js to draw."""

from __future__ import annotations

from dataclasses import asdict

from ..parallel_backend.devices import resolve_devices
from ..parallel_backend.models.model_file import ModelFile
from ..parallel_backend.planner.candidate_table import table
from ..parallel_backend.planner.decide import ExecutionPlan
from ..parallel_backend.planner.memory.rank_memory import in_gib
from ..parallel_backend.planner.preview.form import SelectorInputs
from ..parallel_backend.planner.preview.rank_diagram import assign_devices
from ..parallel_backend.planner.ranking import RankedCandidate
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.strategy import ParallelStrategy
from .host.calls import RunRecord


def run_ui(
    record: RunRecord, report: str, settings: StrategySettings, file: ModelFile, *, images: int, has_cfg: bool
) -> dict[str, list]:
    """A node's `ui` after a run: what ComfyUI keeps in its history. `images`: of the latent."""
    shown: dict[str, list] = {"text": [report]}  # as comfy_api's PreviewText
    if rows := panel_rows(record.plan):
        shown["parallel_candidates"] = rows
    if record.decisions:
        shown["parallel_layout"] = [_layout(record, settings, file, images, has_cfg)]
    return shown


def _layout(
    record: RunRecord, settings: StrategySettings, file: ModelFile, images: int, has_cfg: bool
) -> dict[str, object]:
    """One case of selector_inputs.check_inputs' layout, with the inputs that it ran for."""
    strategy = record.decisions[-1].strategy
    others = [device for device in resolve_devices(settings.devices) if device not in record.devices]
    # Stepwise, ComfyUI decides how many rows a model call has.
    rows = {"images": images, "prompts": 1 + has_cfg} if record.stepwise_because is None else {}
    assigned = assign_devices(strategy, (*record.devices, *others), file, **rows)
    return {
        "title": strategy.describe(),
        "seats": [device.as_dict() for device in assigned],
        "inputs": asdict(SelectorInputs.of(settings)),
    }


def panel_rows(plan: ExecutionPlan | None) -> list[dict[str, object]]:
    """One dict per candidate, the chosen one first; empty where nothing was measured or predicted."""
    if plan is None:
        return []
    chosen = plan.decision.strategy
    return [_row(candidate, chosen) for candidate in table(plan.candidates, chosen)]


def _row(candidate: RankedCandidate, chosen: ParallelStrategy) -> dict[str, object]:
    return {
        "strategy": candidate.strategy.describe(),
        "seconds": candidate.step_s,
        "step": f"{candidate.step_s:.3g} s",
        "how": "measured" if candidate.measured else f"predicted ± {candidate.band:.0%}",
        "memory": f"{in_gib(candidate.memory_bytes)} GiB" if candidate.fits else "does not fit",
        "result": "exact" if candidate.strategy.exact else "approximate",
        "chosen": candidate.strategy == chosen.canonical,
        "possible": candidate.fits and candidate.permitted,
    }
