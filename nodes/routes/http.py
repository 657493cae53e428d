"""Checks requests to the pack's routes: only from ComfyUI's own page, limited in length, and strictly parsed."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from ...parallel_backend.errors import RequestError, TransportError
from ...parallel_backend.wire.strict_json import from_json, parse

_NOT_YOURS = "only ComfyUI's own page may ask for this"

T = TypeVar("T")

_listens = ""  # addresses on which this ComfyUI listens, separated by commas


def serve_on(addresses: str) -> None:
    """Stores the addresses on which ComfyUI listens (its --listen). Called before the first request."""
    global _listens
    _listens = addresses


def is_same_origin(request: web.Request) -> bool:
    """Returns True if the page that asks came from this server. Programs other than browsers name no origin."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    try:
        same = origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
        return same and is_known_host(request.host, _listens)
    except ValueError:  # not an address
        return False


def is_known_host(host: str, listen: str) -> bool:
    """Returns True if `host` (a request's Host) can be the name of a ComfyUI that listens on `listen` (addresses
    separated by commas): loopback, an IP address or one of `listen`.

    A foreign page can point its own name at 127.0.0.1 and would then share an origin with us (DNS rebinding). A ComfyUI
    that other computers can reach has names that it does not know, so every name passes there.
    """
    listens = [one.strip().lower() for one in listen.split(",")]
    if not all(map(_is_loopback, listens)):
        return True
    name = (urlsplit(f"//{host}").hostname or "").lower()
    return _is_loopback(name) or name in listens or _address(name) is not None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def same_origin_only(handler: Handler) -> Handler:
    """Wraps a handler: it answers only ComfyUI's own page, and other pages get {"error"} with 403. A RequestError that
    it raises becomes {"error"} with 400."""

    @functools.wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        if not is_same_origin(request):
            return refuse(_NOT_YOURS, 403)
        try:
            return await handler(request)
        except RequestError as error:
            return refuse(error, 400)

    return answer


def refuse(error: object, status: int) -> web.Response:
    """Returns the response {"error"} with that status."""
    return web.json_response({"error": str(error)}, status=status)


async def read_json(request: web.Request, most: int) -> object:
    """Returns the body, of which at most one byte more than `most` is read. Raises RequestError if it is longer or no
    JSON."""
    try:
        await request.content.readexactly(most + 1)
    except asyncio.IncompleteReadError as end:
        try:
            return parse(end.partial.decode())
        except (ValueError, RecursionError):
            raise RequestError("the body is not understood: it is no JSON") from None
    raise RequestError(f"the body has more than {most} bytes")


async def read_as(kind: type[T], request: web.Request, most: int) -> T:
    """Returns the JSON body as the dataclass `kind`. Raises RequestError if it is no such JSON or too long."""
    try:
        return from_json(await read_json(request, most), kind, "body")
    except (TransportError, RecursionError) as error:
        raise RequestError(f"the body is not understood: {error}") from None
