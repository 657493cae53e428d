"""What ComfyUI's page may ask about the ranks and of them: their state, sleep, stop, another try after failures."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ..parallel_backend import pool
from ..parallel_backend.client import Sidecar, State
from ..parallel_backend.errors import ParallelError
from .doctor_route import is_same_origin

ROUTE = "/parallel_sampling/ranks"
_IDLE = (State.READY, State.ASLEEP, State.FAILED, State.BROKEN)


def add_routes(routes: web.RouteTableDef) -> None:
    """GET answers {"groups": [...]}; POST to sleep, stop, reset the same afterwards, or {"error"} with 403 or 409."""

    @routes.get(ROUTE)
    async def show(request: web.Request) -> web.Response:
        return _groups()

    for name, action in (("sleep", _sleep), ("stop", _stop), ("reset", _reset)):
        routes.post(f"{ROUTE}/{name}")(_asked_for(action))


def _asked_for(action):
    async def answer(request: web.Request) -> web.Response:
        if not is_same_origin(request):
            return web.json_response({"error": "only ComfyUI's own page may ask for this"}, status=403)
        try:
            await asyncio.to_thread(action)
        except ParallelError as error:
            return web.json_response({"error": str(error)}, status=409)
        return _groups()

    return answer


def _groups() -> web.Response:
    return web.json_response({"groups": [_group(sidecar) for sidecar in pool.all_sidecars()]})


def _group(sidecar: Sidecar) -> dict[str, object]:
    model = sidecar.model
    return {
        "devices": list(sidecar.devices),
        "state": sidecar.state.value,
        "ranks": len(sidecar.pids),
        # A name and no path: the page may be open elsewhere.
        "model": None if model is None else model.path.replace("\\", "/").rsplit("/", 1)[-1],
    }


def _sleep() -> None:
    for sidecar in pool.all_sidecars():
        if sidecar.state is State.READY:
            sidecar.sleep(level=2)


def _stop() -> None:
    """Groups that serve a request are left to it: cancelling is ComfyUI's own button."""
    for sidecar in pool.all_sidecars():
        if sidecar.state in _IDLE:
            sidecar.stop()


def _reset() -> None:
    pool.reset()
