"""Routes by which ComfyUI's page reads the ranks' state and makes them sleep, wake, restart, stop or reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from ...parallel_backend.errors import ParallelError, RequestError
from ...parallel_backend.observability.panel import BUSY, show_groups, why_not
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.sidecar import Sidecar
from .http import read_as, refuse, same_origin_only
from .status import default_devices, groups, left_out

ROUTE = "/parallel_sampling/ranks"
MOST_BYTES = 4096


@dataclass(frozen=True)
class GroupRequest:
    """The body of an action. `devices`: those of a group of ranks; empty: the devices that `auto` leaves out."""

    devices: tuple[str, ...]


def add_routes(routes: web.RouteTableDef) -> None:
    """Adds the routes. GET answers {"groups": [...], "left_out": [...]} without gauges. POST of a GroupRequest to an
    action answers the same afterwards, or {"error"} with 400, 403, 404, or 409 if the action is not possible now."""
    served: set[tuple[str, ...]] = set()  # devices of the groups on which an action is running

    @routes.get(ROUTE)
    async def show(request: web.Request) -> web.Response:
        return await _shown()

    def on_request(name: str) -> Handler:
        @same_origin_only
        async def answer(request: web.Request) -> web.Response:
            devices = (await read_as(GroupRequest, request, MOST_BYTES)).devices
            if devices in served:
                return refuse("these processes are busy with another button", 409)
            served.add(devices)
            try:
                return await asyncio.to_thread(_act, name, devices) or await _shown()
            except ParallelError as error:
                return refuse(error, 409)
            finally:
                served.discard(devices)

        return answer

    for name in _ACTIONS:
        routes.post(f"{ROUTE}/{name}")(on_request(name))


async def _shown() -> web.Response:
    found = await asyncio.to_thread(groups)
    return web.json_response(show_groups(found, {}, left_out(found)))


def _act(name: str, devices: tuple[str, ...]) -> web.Response | None:
    """Runs an action. Returns the refusal if the group does not exist or the action is not possible now, else None."""
    found = groups()
    if name == "reset" and not devices and left_out(found):  # the devices may be in no group any more
        pool.reset()
        return None
    status = next((group for group in found if group.devices == devices), None)
    if status is None:
        return refuse("there are no such processes (any more)", 404)
    if reason := why_not(status, left_out(found))[name]:
        return refuse(reason, 409)
    sidecar = next((one for one in pool.all_sidecars() if one.devices == devices), None)
    if sidecar is None and devices == default_devices():
        sidecar = pool.get_sidecar(devices)
    if sidecar is None:
        return refuse("there are no such processes (any more)", 404)
    _ACTIONS[name](sidecar)
    return None


def _stop(sidecar: Sidecar) -> None:
    """Ends idle ranks. Raises RequestError if they serve a request: ComfyUI's own button cancels it."""
    if not sidecar.stop_if_idle():
        raise RequestError(BUSY)


def _restart(sidecar: Sidecar) -> None:
    _stop(sidecar)
    sidecar.start()


_ACTIONS: dict[str, Callable[[Sidecar], object]] = {
    "sleep": Sidecar.sleep,
    "wake": Sidecar.wake,
    "restart": _restart,
    "stop": _stop,
    "reset": lambda sidecar: pool.reset(),
}
