"""Writes each prompt that ComfyUI accepts to the queue log, before its sender gets the answer."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from ...parallel_backend.observability.logs import queue_log

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

_PROMPT = ("/prompt", "/api/prompt")


def begin(server: PromptServer) -> None:
    """Starts the log if its environment variable names a file; otherwise does nothing."""

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
