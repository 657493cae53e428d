"""Tells ComfyUI's page which devices a person may choose, for the picker beside Strategy Selector's text."""

from __future__ import annotations

import asyncio
from contextlib import closing

from aiohttp import web

from ...parallel_backend.observability.device_list import (
    list_clusters,
    list_devices,
    local_devices,
    machine_words,
    selected,
)
from ...parallel_backend.observability.gauges import DeviceGauges
from ...parallel_backend.observability.panel import Shown
from .http import for_own_page
from .status import groups

ROUTE = "/parallel_sampling/devices"
_MOST_LETTERS = 1000


def add_route(routes: web.RouteTableDef) -> None:
    """GET, with `text` as in devices.resolve_devices, answers {"devices": device_list.list_devices, "clusters",
    "selected": those that the text means, "machine": in a sentence}, or {"error"} with 403. Starts nothing."""

    @routes.get(ROUTE)
    @for_own_page
    async def show(request: web.Request) -> web.Response:
        text = request.query.get("text", "all")[:_MOST_LETTERS]
        return web.json_response(await asyncio.to_thread(_list, text))


def _list(text: str) -> Shown:
    chosen = selected(text)
    with closing(DeviceGauges()) as gauges:
        devices = list_devices(local_devices(chosen), groups(), gauges)
    return {
        "devices": devices,
        "clusters": list_clusters(),
        "selected": list(chosen),
        "machine": machine_words(),
    }
