"""The doctor behind a button of ComfyUI's page: one examination at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

ROUTE = "/parallel_sampling/doctor"
_PACK_ROOT = Path(__file__).resolve().parent.parent
_COLUMNS = "100"
_PATIENCE = 600.0  # s; an examination takes half a minute, and longer where ranks hang


def add_route(routes: web.RouteTableDef) -> None:
    """POST without a body; answers {"text", "broken"}, and {"error"} with 403, 409 or 504."""
    busy = asyncio.Lock()

    @routes.post(ROUTE)
    async def examine(request: web.Request) -> web.Response:
        if not is_same_origin(request):
            return web.json_response({"error": "only ComfyUI's own page may ask for this"}, status=403)
        if busy.locked():
            return web.json_response({"error": "the doctor is examining this machine already"}, status=409)
        async with busy:
            return await _examine()


def is_same_origin(request: web.Request) -> bool:
    """Whether the page that asks came from this server. Programs that are no browsers name no origin."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()


async def _examine() -> web.Response:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "parallel_backend",
        "doctor",
        cwd=_PACK_ROOT,
        env={**os.environ, "COLUMNS": _COLUMNS},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
    except asyncio.TimeoutError:
        return web.json_response(
            {
                "error": f"the doctor did not end within {_PATIENCE:.0f} s; run it in a terminal to see where it waits"
            },
            status=504,
        )
    finally:  # also when the page went away or ComfyUI ends
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return web.json_response({"text": said.decode(errors="replace"), "broken": process.returncode != 0})
