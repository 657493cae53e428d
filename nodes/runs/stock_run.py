"""Records call by call a run of a sampler that is not the pack's, sends it to the page at its end, and stores it for
reloaded pages. ComfyUI stores what a node itself reports, and a stock sampler reports nothing of the ranks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.planner.rules import StrategySettings
from ..host.calls import RunRecord
from ..host.page import send_event, shown_node
from ..host.progress import rank_bars
from ..host.settings import price_per_gpu_hour
from .run_ui import finish, phases_of

EVENT, PHASES_EVENT = "parallel_sampling.run", "parallel_sampling.phases"
MAX_PROMPTS = 16  # the page looks this far back into ComfyUI's history

Output = dict[str, list]  # a node's `ui`
_recent: OrderedDict[str, dict[str, Output]] = OrderedDict()  # by prompt, then by node
_lock = threading.Lock()


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
    if record.plan is not None:
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
