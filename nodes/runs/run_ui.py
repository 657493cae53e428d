"""Collects what web/*.js draw of a run on ComfyUI's page: its report, which device did what, the candidates.

ComfyUI stores what a node itself reports, and a stock sampler reports nothing of the ranks: its runs are sent to the
page as they end, and stored for reloaded pages."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.observability.preview.form import SelectorInputs
from ...parallel_backend.observability.preview.rank_diagram import assign_devices
from ...parallel_backend.observability.prompt_phases import PHASES
from ...parallel_backend.observability.timeline import rows_of_timeline, timeline
from ...parallel_backend.planner.candidates import Candidate, table
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.workload.rank_memory import in_gib
from ..host.calls import RunRecord, report_progress
from ..host.page import rank_bars, send_event, shown_node
from ..host.settings import price_per_gpu_hour
from .report import (
    badge,
    compare_prompt,
    compared,
    compared_by_links,
    count_gain,
    headline,
    step_seconds,
    summarise,
    tried_seconds,
    write_report,
)

EVENT, PHASES_EVENT = "parallel_sampling.run", "parallel_sampling.phases"
MAX_PROMPTS = 16  # the page looks this far back into ComfyUI's history

Output = dict[str, list]  # a node's `ui`
_recent: OrderedDict[str, dict[str, Output]] = OrderedDict()  # by prompt, then by node
_lock = threading.Lock()


def finish(record: RunRecord, settings: StrategySettings, file: ModelFile) -> tuple[str, dict[str, list]]:
    """Counts what the run gained for its prompt, shows its summary under the node, and returns (report, the `ui`)."""
    if record.runs:  # no step runs at denoise 0
        count_gain(record)
        report_progress(summarise(record))
    report = write_report(record)
    return report, run_ui(record, report, settings, file)


def run_ui(record: RunRecord, report: str, settings: StrategySettings, file: ModelFile) -> dict[str, list]:
    """Returns a node's `ui` after a run, which ComfyUI stores in its history."""
    shown: dict[str, list] = {"text": [report]}  # the form of comfy_api's PreviewText
    if record.runs:
        shown["parallel_headline"] = [headline(record)]
        shown["parallel_badge"] = [badge(record)]
        if spent := timeline(record.runs[-1]):
            shown["parallel_timeline"] = [rows_of_timeline(spent, record.devices)]
        shown["parallel_phases"] = [phases_of(record.prompt_id)]
        shown["parallel_layout"] = [_layout(record, settings, file)]
    if len(rows := panel_rows(record)) > 1:  # else there was no choice
        shown["parallel_candidates"] = rows
    return shown


def phases_of(prompt_id: str) -> dict[str, object]:
    """Returns {"prompt", "phases": [[name, seconds], …], "compared"} of a prompt until now, for web/lib/timeline.js.
    "phases" is empty if it only sampled."""
    phases = [[phase, round(seconds, 4)] for phase, seconds in PHASES.spent(prompt_id).items()]
    return {"prompt": prompt_id, "phases": phases, "compared": compare_prompt(prompt_id)}


def _layout(record: RunRecord, settings: StrategySettings, file: ModelFile) -> dict[str, object]:
    """Returns one case of the layout of form.check_inputs, with the Strategy Selector's inputs of the run."""
    strategy, job = record.strategy, record.plan.job
    unused = [device for device in resolve_devices(settings.devices) if device not in record.devices]
    devices = (*record.devices, *unused)
    return {
        "title": record.name_of(strategy),
        "seats": assign_devices(strategy, devices, file, images=job.batch, prompts=job.prompts),
        "inputs": asdict(SelectorInputs.of(settings)),
    }


def panel_rows(record: RunRecord) -> list[dict[str, object]]:
    """Returns one dict per candidate; the strategy that ran comes first."""
    if not record.runs:
        return []
    tried = tried_seconds(record)
    if not record.reused_calls:
        tried.setdefault(record.strategy.canonical, step_seconds(record))
    seen = [replace(c, step_s=tried.get(c.strategy, c.step_s)) for c in record.plan.candidates]
    seen.sort(key=lambda c: (not c.fits, not c.permitted, c.step_s is None, c.step_s or 0.0))
    shown = table(seen, record.strategy)
    return [_row(record, candidate, now=candidate.strategy in tried) for candidate in shown]


def _row(record: RunRecord, candidate: Candidate, *, now: bool) -> dict[str, object]:
    """Returns a row; "inputs" set it by hand, "alone": it is one device. `now`: True if this run timed it."""
    seconds, strategy = candidate.step_s, candidate.strategy
    is_chosen = strategy == record.strategy.canonical
    inputs = {name: value for name, value in asdict(strategy).items() if name != "device_shares"}
    return {
        "inputs": {"mode": "manual", **inputs},
        "alone": strategy.world_size == 1,
        "strategy": record.name_of(strategy),
        "seconds": seconds,
        "step": "" if seconds is None else f"{seconds:.3g} s",
        "how": "not tried" if seconds is None else "measured" if now else "measured earlier",
        "compared": compared(record) if is_chosen else "",
        "by_links": compared_by_links(record) if is_chosen else "",
        "memory": f"{in_gib(candidate.memory_bytes)} GiB" if candidate.fits else "does not fit",
        "result": "exact" if strategy.exact else "approximate",
        "chosen": is_chosen,
        "possible": candidate.fits and candidate.permitted,
    }


def recent_runs() -> dict[str, dict[str, Output]]:
    """Returns the outputs of the latest prompts' stock samplers, by prompt id and node id."""
    with _lock:
        return {prompt: dict(nodes) for prompt, nodes in _recent.items()}


@contextmanager
def stock_run(settings: StrategySettings, file: ModelFile) -> Iterator[RunRecord]:
    """Records a job that is shipped whole, whose run goes inside the `with`. Shows a bar for each rank under the
    running node, and at the end sends the run to the page, unless it was cancelled or failed."""
    record = RunRecord(price_per_hour=price_per_gpu_hour())
    with rank_bars():
        _send(None)
        yield record
    if record.runs:
        _send(finish(record, settings, file)[1])


def show_phases(prompt_id: str) -> None:
    """Sends to the page how long the prompt has used the devices for each phase."""
    shown = phases_of(prompt_id)
    if not shown["phases"]:
        return
    with _lock:
        for output in _recent.get(prompt_id, {}).values():
            output["parallel_phases"] = [shown]
    send_event(PHASES_EVENT, shown)


def _send(output: Output | None) -> None:
    """Stores a sampler's output and sends it to the page that queued the prompt. None: the run begins."""
    shown = shown_node()
    if shown is None:
        return
    prompt, node = shown
    if output is not None:
        with _lock:
            _recent.setdefault(prompt, {})[node] = output
            while len(_recent) > MAX_PROMPTS:
                _recent.popitem(last=False)
    send_event(EVENT, {"prompt_id": prompt, "node": node, "output": output})
