"""Routes for programs: metrics for Prometheus on this machine or another, and for a load balancer before several
ComfyUIs the load, as HAProxy's agent-check and as JSON, and draining."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from ...parallel_backend.observability.gauges import read_gauges
from ...parallel_backend.observability.load_report import FOR, LoadReport
from ...parallel_backend.observability.prometheus.metrics_switch import MetricsSwitch
from ..host.settings import price_per_gpu_hour, setting
from .http import is_same_origin, read_as, refuse, same_origin_only
from .status import devices_of, groups

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

AGENT = "/parallel_sampling/agent"
HEALTH = "/parallel_sampling/health"
DRAIN = "/parallel_sampling/drain"
METRICS = "/parallel_sampling/metrics"
_MOST_BYTES = 256


@dataclass(frozen=True)
class DrainRequest:
    """The body of a POST to DRAIN. `draining`: True to refuse prompts from a load balancer."""

    draining: bool


def begin(server: PromptServer) -> None:
    """Adds the routes. GET AGENT with `?for=` one of FOR answers one line without HTTP headers, as HAProxy reads it.
    GET HEALTH answers the load as JSON, and so does POST of a DrainRequest to DRAIN. A restart ends a drain.
    GET METRICS answers in Prometheus' text format, or 403, 404 or 503 with a line that says why."""
    draining = False
    switch = MetricsSwitch(lambda: bool(setting("metrics")), price_per_gpu_hour)
    switch.begin()

    def read(*, with_memory: bool) -> LoadReport:
        found = groups()
        seen = read_gauges(devices_of(found)) if with_memory else {}
        return LoadReport(server.prompt_queue.get_tasks_remaining(), found, seen, draining)

    @server.routes.get(AGENT)
    async def answer_agent(request: web.Request) -> web.StreamResponse:
        requested = request.query.get("for", "")
        if requested not in FOR:
            return refuse(f"?for= must be one of {', '.join(FOR)}", 400)
        line = (await asyncio.to_thread(read, with_memory=False)).agent_line(requested)
        if (connection := request.transport) is not None:  # else it has hung up
            connection.write(f"{line}\n".encode())
            connection.close()
        return _Nothing()

    @server.routes.get(HEALTH)
    @same_origin_only
    async def show(request: web.Request) -> web.Response:
        return web.json_response((await asyncio.to_thread(read, with_memory=True)).as_json())

    @server.routes.post(DRAIN)
    @same_origin_only
    async def drain(request: web.Request) -> web.Response:
        nonlocal draining
        draining = (await read_as(DrainRequest, request, _MOST_BYTES)).draining
        return web.json_response((await asyncio.to_thread(read, with_memory=True)).as_json())

    @server.routes.get(METRICS)
    async def show_metrics(request: web.Request) -> web.Response:
        if not is_same_origin(request):  # Prometheus is not a page and names no origin
            return web.Response(status=403, text="a page of another server may not read this\n")
        answer = await asyncio.to_thread(switch.scrape)
        headers = {"Content-Type": answer.content_type, "Cache-Control": "no-store"}
        return web.Response(status=answer.status, body=answer.body, headers=headers)


class _Nothing(web.Response):
    """A response that writes nothing: the answer was written to the connection directly."""

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None
