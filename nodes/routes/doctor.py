"""The doctor behind a button of ComfyUI's page: one examination at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from .http import NOT_YOURS, is_same_origin, refuse

ROUTE = "/parallel_sampling/doctor"
_PACK_ROOT = Path(__file__).resolve().parents[2]
_COLUMNS = "100"
_PATIENCE = 600.0  # s; an examination takes half a minute, and longer where ranks hang


def add_route(routes: web.RouteTableDef) -> None:
    """POST without a body; answers {"text", "broken"}, and {"error"} with 403, 409 or 504."""
    busy = asyncio.Lock()

    @routes.post(ROUTE)
    async def examine(request: web.Request) -> web.Response:
        if not is_same_origin(request):
            return refuse(NOT_YOURS, 403)
        if busy.locked():
            return refuse("the doctor is examining this machine already", 409)
        async with busy:
            return await _examine()


async def _examine() -> web.Response:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "parallel_backend",
        "doctor",
        "--parent",  # with which it ends, however that ends
        str(os.getpid()),
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
        return refuse(
            f"the doctor did not end within {_PATIENCE:.0f} s; run it in a terminal to see where it waits",
            504,
        )
    finally:  # also when the page went away or ComfyUI ends
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return web.json_response({"text": said.decode(errors="replace"), "broken": process.returncode != 0})
