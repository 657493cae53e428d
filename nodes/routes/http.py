"""Requests of ComfyUI's page to the pack's routes: only from its own page, no longer than it may be, strictly read."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from ...parallel_backend.errors import RequestError, TransportError
from ...parallel_backend.wire.strict_json import from_json, parse

NOT_YOURS = "only ComfyUI's own page may ask for this"

T = TypeVar("T")


def is_same_origin(request: web.Request) -> bool:
    """Whether the page that asks came from this server. Programs that are no browsers name no origin."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
    except ValueError:  # no address at all
        return False


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
