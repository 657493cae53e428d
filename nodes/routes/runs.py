"""What stock samplers told of their runs on the devices, for pages that are loaded anew."""

from __future__ import annotations

from aiohttp import web

from ..runs.stock_run import kept_runs
from .http import NOT_YOURS, is_same_origin, refuse

ROUTE = "/parallel_sampling/runs"


def add_route(routes: web.RouteTableDef) -> None:
    """GET answers {prompt id: {node id: its output}} of the latest prompts, or {"error"} with 403."""

    @routes.get(ROUTE)
    async def show(request: web.Request) -> web.Response:
        if not is_same_origin(request):
            return refuse(NOT_YOURS, 403)
        return web.json_response(kept_runs())
