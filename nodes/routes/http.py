"""Requests of ComfyUI's page to the pack's routes: only from its own page, no longer than it may be, strictly read."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from ...parallel_backend.errors import RequestError, TransportError
from ...parallel_backend.wire.strict_json import from_json, parse

_NOT_YOURS = "only ComfyUI's own page may ask for this"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_listens = ""  # where this ComfyUI listens: addresses with commas


def serve_on(addresses: str) -> None:
    """Notes where ComfyUI listens (its --listen), before the first request."""
    global _listens
    _listens = addresses


def is_same_origin(request: web.Request) -> bool:
    """True if the page that asks came from this server. Programs that are no browsers name no origin."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    try:
        same = origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
        return same and is_known_host(request.host, _listens)
    except ValueError:  # no address at all
        return False


def is_known_host(host: str, listen: str) -> bool:
    """True if `host` (a request's Host) is a name by which a ComfyUI that listens on `listen` (addresses with commas)
    is reached: loopback, an address or one of `listen`.

    A foreign page can point its own name at 127.0.0.1 and would be of one origin with us by that name (DNS rebinding).
    A ComfyUI that others may reach has names that it does not know, so there every name passes.
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
    """Has a handler answer ComfyUI's own page alone, any other {"error"} with 403; what it raises as RequestError
    becomes {"error"} with 400."""

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
    """{"error"} with that status."""
    return web.json_response({"error": str(error)}, status=status)


async def read_body(request: web.Request, most: int) -> bytes:
    """No more of it than tells that it has more than `most` bytes."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
            break
    return bytes(body)


async def read_as(kind: type[T], request: web.Request, most: int) -> T:
    """The body, JSON of the dataclass `kind`. Raises RequestError for any other, and for one that is too long."""
    body = await read_body(request, most)
    if len(body) > most:
        raise RequestError(f"the body has more than {most} bytes")
    try:
        return from_json(parse(body.decode()), kind, "body")
    except (ValueError, RecursionError, TransportError) as error:
        reason = error if isinstance(error, TransportError) else "it is no JSON"
        raise RequestError(f"the body is not understood: {reason}") from None
