"""Routes for the page's panel at Strategy Selector: the devices that a person may choose, and while its inputs are
edited what they will do and what is wrong with them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ...parallel_backend.observability.device_list import (
    list_clusters,
    list_devices,
    local_devices,
    machine_words,
    selected,
)
from ...parallel_backend.observability.panel import Shown
from ...parallel_backend.observability.preview.form import MOST_BYTES, check_inputs, read_request
from ..model.named_file import read_named
from .http import read_json, same_origin_only
from .status import groups

DEVICES = "/parallel_sampling/devices"
CHECK = "/parallel_sampling/check_strategy"


def add_routes(routes: web.RouteTableDef) -> None:
    """Adds the routes. GET DEVICES with `text` as in devices.resolve_devices answers {"devices": list_devices(…),
    "clusters", "selected": the devices that `text` selects, "machine": a sentence}, or {"error"} with 403.

    POST of a body for form.read_request to CHECK answers form.check_inputs(…), or {"error"} with 400 or 403. Neither
    starts ranks."""

    @routes.get(DEVICES)
    @same_origin_only
    async def show(request: web.Request) -> web.Response:
        text = request.query.get("text", "all")
        return web.json_response(await asyncio.to_thread(_list, text))

    @routes.post(CHECK)
    @same_origin_only
    async def check(request: web.Request) -> web.Response:
        body = read_request(await read_json(request, MOST_BYTES))
        return web.json_response(await asyncio.to_thread(check_inputs, body.inputs, body.loader, read_named))


def _list(text: str) -> Shown:
    chosen = selected(text)
    return {
        "devices": list_devices(local_devices(chosen), groups()),
        "clusters": list_clusters(),
        "selected": list(chosen),
        "machine": machine_words(),
    }
