"""Tells ComfyUI's page what Strategy Selector's inputs will do, and what is wrong with them, while they are edited."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.observability.preview.form import MOST_BYTES, Loader, check_inputs, read_inputs
from ..model.named_file import read_named
from .http import for_own_page, read_body

ROUTE = "/parallel_sampling/check_strategy"


def add_route(routes: web.RouteTableDef) -> None:
    """POST what form.read_inputs takes; answers what check_inputs gives, or {"error"} with 400 or 403."""

    @routes.post(ROUTE)
    @for_own_page
    async def check(request: web.Request) -> web.Response:
        inputs, loader = read_inputs(await read_body(request, MOST_BYTES))
        return web.json_response(await asyncio.to_thread(check_inputs, inputs, loader, _find_file))


def _find_file(loader: Loader) -> ModelFile | None:
    return read_named(loader.node, loader.unet_name, loader.source)
