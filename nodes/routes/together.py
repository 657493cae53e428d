"""For how many waiting prompts ComfyUI's page may offer one image per GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp import web

from ..host.settings import setting
from ..together.offer import offers
from ..together.queue import first_and_waiting
from ..together.run import SETTING
from .http import NOT_YOURS, is_same_origin, refuse

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

ROUTE = "/parallel_sampling/waiting"


def add_route(server: PromptServer) -> None:
    """GET answers {"on": whether prompts are computed at once, "workflow": id of the graph of the prompt that runs, or
    waits first, "nodes": {sampler's id: {"waiting", "why_not"}}}, or {"error"} with 403."""

    @server.routes.get(ROUTE)
    async def show(request: web.Request) -> web.Response:
        if not is_same_origin(request):
            return refuse(NOT_YOURS, 403)
        first, waiting = first_and_waiting()
        nodes = {} if first is None else offers(first[2], waiting)
        # What the prompt's page sent with it.
        page = {} if first is None else first[3].get("extra_pnginfo") or {}
        workflow = (page.get("workflow") or {}).get("id")
        told = {name: asdict(offer) for name, offer in nodes.items()}
        return web.json_response({"on": setting(SETTING), "workflow": workflow, "nodes": told})
