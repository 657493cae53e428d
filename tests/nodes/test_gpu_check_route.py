"""The routes of the doctor and the GPU check: they send a line of JSON for each line of progress, then the report.

tests/comfy/test_doctor_route.py starts a second one, and shows that a closed dialog ends its request.
"""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import parallel_backend.sidecar.pool as pool
from pack_nodes import import_node_module
from scripted import processes_with
from waiting import run_in_own_loop

doctor = import_node_module("nodes.routes.doctor")

# Replaces `python -m parallel_backend`: prints its options, then leaves a report or none, or never ends.
PROGRAM = """
import json, sys, time
from pathlib import Path
print(" ".join(a for a in sys.argv[1:] if a.startswith("--")), flush=True)
while "{ending}" == "never":
    print("still at it", flush=True)
    time.sleep(0.05)
if "--json" in sys.argv:
    print(json.dumps({"phase": "looking"}))
    print("a library's own words", flush=True)
    if "{ending}" == "report":
        print(json.dumps({"exit_status": 1, "verdicts": [], "summary": "1 broken."}))
    sys.exit(1)
folder = Path(sys.argv[sys.argv.index("--report") + 1])
if "{ending}" in ("report", "result"):
    (folder / "gpu-check.json").write_text(json.dumps({"exit_status": 1}))
    (folder / "gpu-check.md").write_text("# GPU check")
if "{ending}" == "result":
    Path(sys.argv[sys.argv.index("--share") + 1]).write_text("{}")
sys.exit(1)
"""


@pytest.fixture
def ranks(monkeypatch):
    """Ranks of ComfyUI that are idle; `asked`: how often they were asked to stop."""
    found = SimpleNamespace(idle=True, asked=0)

    def stop_if_idle():
        found.asked += 1
        return found.idle

    monkeypatch.setattr(pool, "all_sidecars", lambda: (SimpleNamespace(stop_if_idle=stop_if_idle),))
    return found


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Returns a function that makes the doctor end in the given way."""

    def say(ending):
        package = tmp_path / "parallel_backend"
        package.mkdir()
        (package / "__main__.py").write_text(PROGRAM.replace("{ending}", ending))
        monkeypatch.setattr(doctor, "_PACK_ROOT", tmp_path)

    return say


def asked(talk):
    """Runs `talk(client)` against a server with the doctor's routes and returns its result."""

    async def run():
        routes = web.RouteTableDef()
        doctor.add_routes(routes)
        app = web.Application()
        app.add_routes(routes)
        async with TestClient(TestServer(app)) as client:
            return await talk(client)

    return run_in_own_loop(run())


async def post(client, route=doctor.GPU_ROUTE):
    async with client.post(route) as answer:
        return answer.status, [json.loads(line) for line in (await answer.text()).splitlines()]


@pytest.mark.parametrize(("ending", "result"), [("result", "{}"), ("report", "")])
def test_progress_comes_line_by_line_and_the_report_at_the_end(ends, ranks, ending, result):
    """Strategies that could not be measured cost no report."""
    ends(ending)
    status, (progress, end) = asked(post)
    assert status == 200 and progress == {"line": "--parent --gpu --report --share"}
    assert end == {"markdown": "# GPU check", "report": {"exit_status": 1}, "result": result}
    assert ranks.asked == 1


def test_the_doctor_says_what_it_does_and_gives_its_report_as_data(ends, ranks):
    ends("report")
    status, (progress, end) = asked(lambda client: post(client, doctor.ROUTE))
    assert status == 200 and progress == {"line": "looking"}
    assert end == {"report": {"exit_status": 1, "verdicts": [], "summary": "1 broken."}}
    assert ranks.asked == 0  # ComfyUI's ranks keep running


@pytest.mark.parametrize(
    ("route", "error"),
    [
        (doctor.ROUTE, "the doctor left no report: a library's own words"),
        (doctor.GPU_ROUTE, "the GPU check left no report: --parent --gpu --report --share"),
    ],
)
def test_one_that_ends_without_a_report_is_told_by_its_last_words(ends, ranks, route, error):
    ends("nothing")
    assert asked(lambda client: post(client, route))[1][-1] == {"error": error}


def test_it_ends_with_the_request(ends, ranks):
    ends("never")

    async def leave(client):
        async with client.post(doctor.GPU_ROUTE) as answer:
            await answer.content.readline()
            assert processes_with("--gpu", str(os.getpid()))
            answer.close()
        while processes_with("--gpu", str(os.getpid())):
            await asyncio.sleep(0.05)

    asked(leave)


def test_it_does_not_run_beside_a_prompt(ends, ranks):
    ends("report")
    ranks.idle = False
    status, (said,) = asked(post)
    assert status == 409 and "a prompt uses the devices" in said["error"]
