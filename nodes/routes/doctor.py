"""The doctor and its GPU check behind buttons of ComfyUI's page: one examination at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from ...parallel_backend.sidecar import pool
from .http import NOT_YOURS, is_same_origin, refuse

ROUTE = "/parallel_sampling/doctor"
GPU_ROUTE = "/parallel_sampling/gpu_check"
_PACK_ROOT = Path(__file__).resolve().parents[2]
_COLUMNS = "100"
_PATIENCE = 600.0  # s; an examination takes half a minute, and longer where ranks hang


def add_route(routes: web.RouteTableDef) -> None:
    """POST without a body. The doctor answers {"text", "broken"}; the GPU check a line of JSON for each line of its
    progress, {"line"}, and at the end {"markdown", "report", "broken"} or {"error"}. Both {"error"} with 403 or 409."""
    busy = asyncio.Lock()

    def refusal(request: web.Request) -> web.Response | None:
        if not is_same_origin(request):
            return refuse(NOT_YOURS, 403)
        return refuse("the doctor is examining this machine already", 409) if busy.locked() else None

    @routes.post(ROUTE)
    async def examine(request: web.Request) -> web.Response:
        if refused := refusal(request):
            return refused
        async with busy:
            return await _examine()

    @routes.post(GPU_ROUTE)
    async def check_gpu(request: web.Request) -> web.StreamResponse:
        if refused := refusal(request):
            return refused
        async with busy:
            if not await asyncio.to_thread(_make_way):
                return refuse("a prompt uses the devices; run the GPU check when none does", 409)
            return await _check_gpu(request)


async def _examine() -> web.Response:
    async with _doctor() as process:
        try:
            said, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
        except asyncio.TimeoutError:
            return refuse(
                f"the doctor did not end within {_PATIENCE:.0f} s; run it in a terminal to see where it waits",
                504,
            )
        return web.json_response({"text": said.decode(errors="replace"), "broken": process.returncode != 0})


def _make_way() -> bool:
    """Ends this ComfyUI's ranks, whose models would be in the way; False where one of them works."""
    return all(sidecar.stop_if_idle() for sidecar in pool.all_sidecars())


async def _check_gpu(request: web.Request) -> web.StreamResponse:
    """Each check has a limit of its own, and the page can end all by going away."""
    response = web.StreamResponse(
        headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
    )
    await response.prepare(request)

    async def tell(message: dict[str, object]) -> None:
        await response.write(json.dumps(message).encode() + b"\n")

    with tempfile.TemporaryDirectory(prefix="parallel-doctor-") as folder:
        async with _doctor("--gpu", "--report", folder) as process:
            assert process.stdout is not None
            said = ""
            async for line in process.stdout:
                said = line.decode(errors="replace").rstrip()
                await tell({"line": said})
            await process.wait()
        try:
            report = json.loads(Path(folder, "gpu-check.json").read_text())
            markdown = Path(folder, "gpu-check.md").read_text()
        except (OSError, ValueError):
            await tell({"error": f"the GPU check left no report: {said}"})
        else:
            await tell({"markdown": markdown, "report": report, "broken": process.returncode != 0})
    await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def _doctor(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m parallel_backend doctor` with these arguments, gone afterwards with what it started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "parallel_backend",
        "doctor",
        "--parent",  # with which it ends, however that ends
        str(os.getpid()),
        *arguments,
        cwd=_PACK_ROOT,
        env={**os.environ, "COLUMNS": _COLUMNS},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:  # also when the page went away or ComfyUI ends
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
