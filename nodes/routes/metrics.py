"""The route of the metrics on ComfyUI's own server, for Prometheus on this machine or another."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ...parallel_backend.observability.prometheus.metrics_switch import MetricsSwitch
from ..host.settings import price_per_gpu_hour, setting
from .http import is_same_origin

ROUTE = "/parallel_sampling/metrics"


def add_routes(routes: web.RouteTableDef) -> None:
    """Adds the route. GET answers in Prometheus' text format, or 403, 404 or 503 with a line that says why."""
    switch = MetricsSwitch(lambda: bool(setting("metrics")), price=price_per_gpu_hour)
    switch.begin()

    @routes.get(ROUTE)
    async def show(request: web.Request) -> web.Response:
        if not is_same_origin(request):  # Prometheus is not a page and names no origin
            return web.Response(status=403, text="a page of another server may not read this\n")
        answer = await asyncio.to_thread(switch.scrape)
        headers = {"Content-Type": answer.content_type, "Cache-Control": "no-store"}
        return web.Response(status=answer.status, body=answer.body, headers=headers)
