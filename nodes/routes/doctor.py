"""Routes by which ComfyUI's page runs the doctor or its GPU check: one at a time, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from ...parallel_backend.sidecar import pool
from .http import refuse, same_origin_only

ROUTE = "/parallel_sampling/doctor"
GPU_ROUTE = "/parallel_sampling/gpu_check"
_PACK_ROOT = Path(__file__).resolve().parents[2]
_BUSY = "the doctor is examining this machine already"
_COLUMNS = "100"
_LONGEST_LINE = 2**20  # bytes; a report is one line, long with the tables of many GPUs
_PATIENCE = 600.0  # s; an examination takes half a minute, and longer if ranks hang

_Tell = Callable[[dict[str, object]], Awaitable[None]]


def add_routes(routes: web.RouteTableDef) -> None:
    """Adds two routes for POST without a body. They answer lines of JSON: {"line"} for each line of progress, then
    {"report"} (of the GPU check also "markdown", "result") or {"error"}. Refusals: {"error"}, 403 or 409."""
    busy = asyncio.Lock()

    def one_at_a_time(run: Handler) -> Handler:
        @same_origin_only
        async def answer(request: web.Request) -> web.StreamResponse:
            if busy.locked():
                return refuse(_BUSY, 409)
            async with busy:
                return await run(request)

        return answer

    routes.post(ROUTE)(one_at_a_time(_examine))
    routes.post(GPU_ROUTE)(one_at_a_time(_check_gpu))


async def _examine(request: web.Request) -> web.StreamResponse:
    async with _doctor(request, "--json") as (answer, tell, process):
        try:
            last = await asyncio.wait_for(_last_message(process, tell), _PATIENCE)
        except asyncio.TimeoutError:
            last = f"it did not end within {_PATIENCE:.0f} s; run it in a terminal to see where it waits"
        is_words = isinstance(last, str)
        await tell({"error": f"the doctor left no report: {last}"} if is_words else {"report": last})
    return answer


async def _last_message(process: asyncio.subprocess.Process, tell: _Tell) -> dict[str, object] | str:
    """Passes on what the doctor does, and returns its report, or the last words of a doctor that leaves none."""
    assert process.stdout is not None
    report, words = None, ""
    async for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):  # the words of another program
            words = line.decode(errors="replace").rstrip()
        elif "phase" in message:
            await tell({"line": message["phase"]})
        else:
            report = message
    return words if report is None else report


async def _check_gpu(request: web.Request) -> web.StreamResponse:
    """Runs the GPU check. It needs no time limit here: each check has its own, and closing the page ends them all. Ends
    this ComfyUI's ranks first, whose models would take the memory, and refuses if one of them is working."""
    if not await asyncio.to_thread(lambda: all(sidecar.stop_if_idle() for sidecar in pool.all_sidecars())):
        return refuse("a prompt uses the devices; run the GPU check when none does", 409)
    with tempfile.TemporaryDirectory(prefix="parallel-doctor-") as folder:
        shared = Path(folder, "result.json")
        options = ("--gpu", "--report", folder, "--share", str(shared))
        async with _doctor(request, *options) as (answer, tell, process):
            assert process.stdout is not None
            words = ""
            async for line in process.stdout:
                words = line.decode(errors="replace").rstrip()
                await tell({"line": words})
            await process.wait()
            try:
                report = json.loads(Path(folder, "gpu-check.json").read_text())
                markdown = Path(folder, "gpu-check.md").read_text()
            except (OSError, ValueError):
                await tell({"error": f"the GPU check left no report: {words}"})
            else:
                # "" if strategies could not be measured: the last line says why.
                result = shared.read_text() if shared.exists() else ""
                await tell({"markdown": markdown, "report": report, "result": result})
    return answer


@contextlib.asynccontextmanager
async def _doctor(
    request: web.Request, *arguments: str
) -> AsyncIterator[tuple[web.StreamResponse, _Tell, asyncio.subprocess.Process]]:
    """Runs `python -m parallel_backend doctor` with these arguments. Yields an HTTP answer, a function that writes a
    message on it as a line of JSON, and the process. At the end kills it and all that it started."""
    answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})

    async def tell(message: dict[str, object]) -> None:
        await answer.write(json.dumps(message).encode() + b"\n")

    await answer.prepare(request)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "parallel_backend",
        "doctor",
        "--parent",  # the doctor ends with this process, even after a crash
        str(os.getpid()),
        *arguments,
        cwd=_PACK_ROOT,
        env={**os.environ, "COLUMNS": _COLUMNS},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=_LONGEST_LINE,
    )
    try:
        yield answer, tell, process
    finally:  # also when the page went away or ComfyUI ends
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    await answer.write_eof()
