"""A run of a sampler that is not the pack's: recorded call by call, told to the page at its end, and kept for pages
that are loaded anew. ComfyUI keeps what nodes say of themselves; of a stock sampler nobody else would."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.planner.rules import StrategySettings
from ..host.calls import RunRecord, report_progress
from ..host.progress import rank_bars
from ..host.settings import price_per_gpu_hour
from ..host.shown_node import shown_node
from .report import summarise, write_report
from .run_ui import run_ui

EVENT = "parallel_sampling.run"
PROMPTS_KEPT = 16  # as far back as the page looks into ComfyUI's history

Output = dict[str, list]  # a node's `ui`
_kept: OrderedDict[str, dict[str, Output]] = OrderedDict()  # by prompt, then by node
_lock = threading.Lock()


def kept_runs() -> dict[str, dict[str, Output]]:
    """What the samplers of the latest prompts told, by prompt and node."""
    with _lock:
        return {prompt: dict(nodes) for prompt, nodes in _kept.items()}


class StockRun:
    """From its making to `end`: bars for the ranks under the node that runs, and its record."""

    def __init__(self, settings: StrategySettings, file: ModelFile) -> None:
        self.record = RunRecord(price_per_hour=price_per_gpu_hour())
        self._settings = settings
        self._file = file
        self._bars = ExitStack()
        self._bars.enter_context(rank_bars())
        _send(None)

    def end(self, *, whole: bool) -> None:
        """`whole`: it was neither cancelled nor did it fail."""
        self._bars.close()
        record = self.record
        if not whole or record.plan is None:
            return
        report_progress(summarise(record))
        job = record.plan.job
        shown = run_ui(
            record,
            write_report(record),
            self._settings,
            self._file,
            images=job.batch,
            has_cfg=job.has_cfg,
        )
        _send(shown)


@contextmanager
def stock_run(settings: StrategySettings, file: ModelFile) -> Iterator[RunRecord]:
    """Records a job that is shipped whole; inside is the run."""
    run, is_whole = StockRun(settings, file), False
    try:
        yield run.record
        is_whole = True
    finally:
        run.end(whole=is_whole)


def _send(output: Output | None) -> None:
    """To the page that queued the prompt; None: the run begins."""
    from server import PromptServer  # imports ComfyUI's whole server: not wanted before it runs

    shown = shown_node()
    if shown is None:
        return
    prompt, node = shown
    if output is not None:
        with _lock:
            _kept.setdefault(prompt, {})[node] = output
            while len(_kept) > PROMPTS_KEPT:
                _kept.popitem(last=False)
    server = getattr(PromptServer, "instance", None)
    client = getattr(server, "client_id", None)
    if client is not None:
        told = {"prompt_id": prompt, "node": node, "output": output}
        server.send_sync(EVENT, told, client)
