"""Sends the status of the ranks over ComfyUI's websocket, only to pages whose panel is open and visible."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from ...parallel_backend.devices import is_cpu, resolve_devices
from ...parallel_backend.observability.device_list import list_devices, machine_words
from ...parallel_backend.observability.gauges import read_gauges
from ...parallel_backend.observability.live_feed import LiveSender
from ...parallel_backend.observability.panel import Shown, show_groups
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.failures import FAILING
from ...parallel_backend.sidecar.status import GroupStatus
from ..host.settings import setting, settings_problems
from .http import read_as, refuse, same_origin_only

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

ROUTE = "/parallel_sampling/watch"
EVENT = "parallel_sampling.status"
LEASE = 15.0  # s that a page counts as watching after its message, which it repeats every few seconds
MOST_BYTES = 1024


@dataclass(frozen=True)
class Watch:
    """A page's message that it watches or has stopped. `client_id`: of its websocket; `anew`: it has no status yet."""

    client_id: str
    looking: bool
    anew: bool


def default_devices() -> tuple[str, ...]:
    """Returns the devices on which ranks start if no Strategy Selector is connected."""
    return resolve_devices(setting("default_devices"))


def groups() -> tuple[GroupStatus, ...]:
    """Returns the status of every group of ranks; if there is none, of the group that could be started."""
    found = tuple(sidecar.status() for sidecar in pool.all_sidecars())
    return found or (GroupStatus(default_devices(), "down", "", None, (), 0, 0, (), ()),)


def devices_of(found: tuple[GroupStatus, ...]) -> tuple[str, ...]:
    """Returns the devices of all groups, each once."""
    return tuple(dict.fromkeys(device for group in found for device in group.devices))


def left_out(found: tuple[GroupStatus, ...]) -> tuple[str, ...]:
    """Returns the devices that `auto` leaves out, whether or not a group uses them."""
    return FAILING.among(tuple(dict.fromkeys((*resolve_devices("all"), *devices_of(found)))))


def snapshot() -> Shown:
    """Returns the panel's content now, with the devices' gauges. "others": GPUs that no group uses."""
    found = groups()
    devices = devices_of(found)
    shown = show_groups(found, read_gauges(devices), left_out(found))
    unused = tuple(
        device for device in resolve_devices("all") if device not in devices and not is_cpu((device,))
    )
    return {
        **shown,
        "settings": list(settings_problems()),
        "machine": machine_words(),
        "others": list_devices(unused, found),
    }


def begin(server: PromptServer) -> LiveSender[Shown]:
    """Adds the route by which pages start and stop watching. Returns the sender; it runs only while a page watches."""

    def send(message: Shown, client: str) -> bool:
        if client not in server.sockets:
            return False
        server.send_sync(EVENT, message, client)
        return True

    sender = LiveSender(snapshot, send)

    @server.routes.post(ROUTE)
    @same_origin_only
    async def watch(request: web.Request) -> web.Response:
        message = await read_as(Watch, request, MOST_BYTES)
        if not message.looking:
            await asyncio.to_thread(sender.leave, message.client_id)
        elif message.client_id not in server.sockets:
            return refuse("this page has no websocket here", 409)
        elif not await asyncio.to_thread(lambda: sender.watch(message.client_id, LEASE, anew=message.anew)):
            return refuse("too many pages look at the processes already", 429)
        return web.json_response({"seconds": LEASE})

    return sender
