"""The route of *Preload* in a loader's menu: loads a model of the graph on the devices ahead of its first prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler

from ...parallel_backend.errors import ParallelError, RequestError
from ...parallel_backend.sidecar.group.events import listen
from ..host import memory
from ..routes.http import read_as, refuse, same_origin_only
from .named_model import preload
from .next_prompt import NextPrompt, uses_ranks

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

ROUTE = "/parallel_sampling/preload"
MOST_BYTES = 4 * 1024 * 1024  # of a request body; a large graph takes a tenth
_FREE = ("/free", "/api/free")  # ComfyUI's
_BUSY = "a prompt that uses the devices is running; its turn comes first"


@dataclass(frozen=True)
class PreloadRequest:
    """The body of a request. `prompt`: a graph in ComfyUI's API format; `node`: the id of a loader in it."""

    prompt: dict
    node: str

    def __post_init__(self) -> None:
        if not all(map(_is_node, self.prompt.values())):
            raise RequestError("the prompt is no graph in ComfyUI's API format")


def begin(server: PromptServer) -> None:
    """Adds the route, and prepares the next waiting prompt early if the setting preload_next says so.

    POST of a PreloadRequest answers {"model", "devices", "was_there", "seconds"}, or {"error"} with 400, 403 or 409.
    Nothing has changed after an error.
    """
    queue = server.prompt_queue
    listen(memory.on_event)
    listen(NextPrompt(queue).on_event)

    @web.middleware
    async def give_back(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.method == "POST" and request.path in _FREE:
            await asyncio.to_thread(memory.drop_ahead)
        return answer

    server.app.middlewares.append(give_back)

    @server.routes.post(ROUTE)
    @same_origin_only
    async def load(request: web.Request) -> web.Response:
        body = await read_as(PreloadRequest, request, MOST_BYTES)
        if uses_ranks(queue):
            return refuse(_BUSY, 409)
        try:
            info, devices = await asyncio.to_thread(preload, body.prompt, body.node)
        except ParallelError as error:
            return refuse(error, 409)
        answer = {"model": info.model, "devices": devices, "was_there": info.cached, "seconds": info.seconds}
        return web.json_response(answer)


def _is_node(value: Any) -> bool:
    found = value if isinstance(value, dict) else {}
    return isinstance(found.get("class_type"), str) and isinstance(found.get("inputs"), dict)
