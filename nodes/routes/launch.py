"""Starts with ComfyUI: the live status, toasts, the timer for idle ranks, the queue log if its variable names a file,
and the ranks if the setting says so."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler
from comfy.cli_args import args

from ...parallel_backend.errors import ParallelError
from ...parallel_backend.observability.logs import queue_log
from ...parallel_backend.observability.prompt_phases import PHASES
from ...parallel_backend.observability.toasts import Notifier, Toast
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.events import listen
from ...parallel_backend.sidecar.idle_timer import IdleWatch, Timeouts
from ..host.settings import setting
from ..job.pack_variables import note_variables
from ..job.replaced import loaded_packs
from ..runs.run_ui import recent_runs
from . import http
from . import status as live_status

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

TOAST = "parallel_sampling.toast"
RUNS = "/parallel_sampling/runs"
_PROMPT = ("/prompt", "/api/prompt")  # ComfyUI's

log = logging.getLogger(__name__)


def begin(server: PromptServer) -> None:
    """Adds routes and listeners while ComfyUI loads the pack. Starts no thread or process until something happens.

    GET RUNS gives a reloaded page {prompt id: {node id: its output}} of the latest runs of stock samplers.
    """
    http.serve_on(args.listen)
    _log_queue(server)
    status = live_status.begin(server)
    listen(lambda event: status.changed())
    listen(PHASES.on_event)

    def show(toast: Toast) -> None:
        server.send_sync(TOAST, asdict(toast))  # every open page, once

    listen(Notifier(show).on_event)
    listen(IdleWatch(pool.all_sidecars, _timeouts).on_event)

    @server.routes.get(RUNS)
    @http.same_origin_only
    async def show_runs(request: web.Request) -> web.Response:
        return web.json_response(recent_runs())

    async def start_ranks(app: web.Application) -> None:
        note_variables(loaded_packs())  # all are imported, and no node has run
        if setting("start_at_launch"):
            threading.Thread(target=_start_ranks, name="parallel-launch", daemon=True).start()

    server.app.on_startup.append(start_ranks)


def _timeouts() -> Timeouts:
    return Timeouts(60.0 * setting("sleep_after_minutes"), 60.0 * setting("stop_after_minutes"))


def _start_ranks() -> None:
    try:
        pool.get_sidecar(live_status.default_devices()).start()
    except ParallelError as error:
        log.warning("parallel sampling: the processes did not start with ComfyUI: %s", error)


def _log_queue(server: PromptServer) -> None:
    """Starts the queue log if its environment variable names a file: it has a prompt before its sender is answered."""

    def queued() -> set[str]:
        running, waiting = server.prompt_queue.get_current_queue_volatile()
        return {item[1] for item in (*running, *waiting)}

    log = queue_log.begin(queued)
    if log is None:
        return

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.method == "POST" and request.path in _PROMPT and answer.status == 200:
            assert isinstance(answer, web.Response)
            accepted, body = json.loads(answer.text or ""), await request.read()
            await asyncio.to_thread(
                lambda: log.accept(accepted["prompt_id"], float(accepted["number"]), json.loads(body))
            )
        return answer

    server.app.middlewares.append(note)
