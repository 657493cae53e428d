"""What a run leaves for ComfyUI's page: its report, which device did what, and the candidates, for web/*.js to draw."""

from __future__ import annotations

from dataclasses import asdict

from ..parallel_backend.devices import resolve_devices
from ..parallel_backend.models.flux.keys import FluxDims
from ..parallel_backend.planner.candidate_table import CandidateEstimate, same, table
from ..parallel_backend.planner.decide import ExecutionPlan
from ..parallel_backend.planner.memory.model import in_gib
from ..parallel_backend.planner.preview.form import SelectorInputs
from ..parallel_backend.planner.preview.rank_diagram import seats_of
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.strategy import ParallelStrategy
from .host.calls import RunRecord


def run_ui(
    record: RunRecord, report: str, choice: StrategySettings, dims: FluxDims, *, images: int, has_cfg: bool
) -> dict[str, list]:
    """A node's `ui` after a run: what ComfyUI keeps in its history. `images`: of the latent."""
    shown: dict[str, list] = {"text": [report]}  # as comfy_api's PreviewText
    if rows := panel_rows(record.decided):
        shown["parallel_candidates"] = rows
    if record.decisions:
        shown["parallel_layout"] = [_layout(record, choice, dims, images, has_cfg)]
    return shown


def _layout(
    record: RunRecord, choice: StrategySettings, dims: FluxDims, images: int, has_cfg: bool
) -> dict[str, object]:
    """One case of selector_inputs.check_inputs' layout, with the inputs that it ran for."""
    strategy = record.decisions[-1].strategy
    others = [device for device in resolve_devices(choice.devices) if device not in record.devices]
    # Stepwise, ComfyUI decides how many rows a model call has.
    rows = {"images": images, "prompts": 1 + has_cfg} if record.stepwise_because is None else {}
    seats = seats_of(strategy, (*record.devices, *others), dims, **rows)
    return {
        "title": strategy.describe(),
        "seats": [seat.as_dict() for seat in seats],
        "inputs": asdict(SelectorInputs.of(choice)),
    }


def panel_rows(decided: ExecutionPlan | None) -> list[dict[str, object]]:
    """One dict per candidate, the chosen one first; empty where nothing was measured or predicted."""
    if decided is None:
        return []
    chosen = decided.decision.strategy
    return [_row(outlook, chosen) for outlook in table(decided.outlooks, chosen)]


def _row(outlook: CandidateEstimate, chosen: ParallelStrategy) -> dict[str, object]:
    return {
        "strategy": outlook.strategy.describe(),
        "seconds": outlook.step_s,
        "step": f"{outlook.step_s:.3g} s",
        "how": "measured" if outlook.measured else f"predicted ± {outlook.band:.0%}",
        "memory": f"{in_gib(outlook.memory_bytes)} GiB" if outlook.fits else "does not fit",
        "result": "exact" if outlook.exact else "approximate",
        "chosen": same(outlook.strategy, chosen),
        "possible": outlook.fits and outlook.permitted,
    }
