"""The route that gives a reloaded page the recent runs of stock samplers on the devices."""

from __future__ import annotations

from aiohttp import web

from ..runs.stock_run import recent_runs
from .http import same_origin_only

ROUTE = "/parallel_sampling/runs"


def add_route(routes: web.RouteTableDef) -> None:
    """Adds the route. GET answers {prompt id: {node id: its output}} of the latest prompts, or {"error"} with 403."""

    @routes.get(ROUTE)
    @same_origin_only
    async def show(request: web.Request) -> web.Response:
        return web.json_response(recent_runs())
