"""deploy/haproxy.cfg in front of three real ComfyUIs: who is let in, where prompts go, what a killed ComfyUI costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import urllib.request
import uuid
from http.cookies import SimpleCookie

import aiohttp
import pytest

from comfy_harness import Comfy, start_comfyui
from front_door import FrontDoor, front_door_of, require_haproxy
from graphs import Graph
from parallel_backend.__main__ import main
from parallel_backend.observability.logs.queue_log import Entry, QueueLogFolder
from waiting import run_in_own_loop, wait_until

NAMES = ("a", "b", "c")  # names of the ComfyUIs in the configuration
PROMPTS = 48
_SEEDS = itertools.count(1)


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    folder, environment = tmp_path_factory.mktemp("door"), {"PARALLEL_TEST_FORKED_RANKS": "1"}
    servers = {name: start_comfyui(folder / name, environment=environment) for name in NAMES}
    with front_door_of(servers, require_haproxy(), folder) as running:
        yield running


def _picture(steps: int = 1) -> dict:
    """Returns a prompt for a small picture of the demo model, with a new seed in each call."""
    graph = Graph()
    loader = graph.add("ParallelDemoLoader")
    text = [graph.add("CLIPTextEncode", clip=[loader, 2], text="a red circle"), 0]
    latent = [graph.add("EmptySD3LatentImage", width=32, height=32, batch_size=1), 0]
    sampled = graph.parallel_sampler(loader, text, text, latent, steps=steps, seed=next(_SEEDS))
    image = [graph.add("VAEDecode", samples=sampled, vae=[loader, 3]), 0]
    graph.add("SaveImage", images=image, filename_prefix="door")
    return graph.prompt


def _named(cookies: SimpleCookie) -> str:
    """Returns the ComfyUI that the session cookie names, or "" if the answer sets none. The cookie holds only the name:
    HAProxy would not recognise a value that programs must quote."""
    cookie = cookies.get("COMFYUI")
    return cookie.value if cookie else ""


async def _send(client: aiohttp.ClientSession, body: dict) -> tuple[int, dict, str]:
    """Posts a prompt; returns (status, answer, the ComfyUI that the cookie names or "")."""
    async with client.post("/prompt", json=body) as answer:
        return answer.status, await answer.json(), _named(answer.cookies)


async def _outcome(client: aiohttp.ClientSession, prompt_id: str) -> dict | None:
    """Returns the history of a prompt once it has ended, or None if the front door says that it is lost."""
    while True:
        async with client.get(f"/history/{prompt_id}") as answer:
            if answer.status in (502, 503):
                return None
            found = await answer.json()
        if prompt_id in found:
            return found[prompt_id]
        await asyncio.sleep(0.1)


def _asked(door: FrontDoor, name: str, path: str) -> dict:
    """Returns the JSON that one ComfyUI itself answers."""
    return Comfy(door.servers[name]).ask(path, method="GET")[1]


def _load(door: FrontDoor, name: str) -> dict:
    """Returns one ComfyUI's report of its load."""
    return _asked(door, name, "/parallel_sampling/health")


def _drain(door: FrontDoor, name: str, draining: bool) -> None:
    status, _ = Comfy(door.servers[name]).ask("/parallel_sampling/drain", {"draining": draining})
    assert status == 200


async def _status(client: aiohttp.ClientSession, path: str, method: str = "GET", **options) -> int:
    """Returns the status of an answer. A refusal says why."""
    async with client.request(method, path, **options) as answer:
        assert answer.status < 300 or "error" in await answer.json()
        return answer.status


def test_strangers_and_those_who_guess_are_refused_and_others_served(door):
    async def story():
        async with door.client() as stranger, door.client(token="guess", source="127.0.0.2") as guesser:
            assert await _status(stranger, "/queue") == 401
            guesses = [await _status(guesser, "/queue") for _ in range(36)]
            assert guesses == [401] * 31 + [429] * 5
        async with door.client(person=True, source="127.0.0.2") as person:
            assert await _status(person, "/queue") == 429  # the same address as the guesser's
        async with door.client(token=door.tokens[0], source="127.0.0.2") as program:
            assert await _status(program, "/queue") == 200
        async with door.client(person=True) as person:
            assert await _status(person, "/queue") == 200

    run_in_own_loop(story())


def test_bodies_have_limits_and_operators_routes_are_closed(door):
    async def chunks():
        yield b"{}"

    async def story():
        async with door.client(token=door.tokens[0]) as program:
            for path in ("/prompt", "/api/prompt", "/%70rompt"):
                assert await _status(program, path, "POST", data=b" " * (4 * 2**20 + 1)) == 413, path
            assert await _status(program, "/free", "POST", data=b" " * (16 * 2**20 + 1)) == 413
            assert await _status(program, "/prompt", "POST", data=chunks()) == 411
            assert await _status(program, "/prompt", "POST", data=b"{}") == 400  # ComfyUI's own answer
            for path in ("health", "agent?for=prompts", "metrics", "%64rain"):
                assert await _status(program, f"/parallel_sampling/{path}") == 403, path
                assert await _status(program, f"/api/parallel_sampling/{path}") == 403, path

    run_in_own_loop(story())


def test_one_who_floods_is_refused_by_name_and_others_are_not(door):
    async def story():
        async with door.client(token=door.tokens[1]) as flooder, door.client(token=door.tokens[2]) as other:
            answers = [await _send(flooder, {}) for _ in range(70)]
            assert [status for status, _, _ in answers] == [400] * 60 + [429] * 10
            assert "60 prompts" in answers[-1][1]["error"]
            assert (await _send(other, {}))[0] == 400

    run_in_own_loop(story())
    with urllib.request.urlopen(door.metrics, timeout=60) as answer:
        text = answer.read().decode()
    assert 'haproxy_server_weight{proxy="prompts",server="a"}' in text


def test_a_page_keeps_its_comfyui_and_its_websocket_hears_of_its_prompt(door):
    async def story():
        async with door.client(person=True) as page:
            async with page.get("/queue") as answer:
                home, cookie = _named(answer.cookies), answer.cookies["COMFYUI"]
            assert cookie["secure"] and cookie["httponly"]
            async with page.ws_connect("/ws?clientId=page") as websocket:
                status, answer, moved = await _send(page, {"prompt": _picture(), "client_id": "page"})
                assert status == 200 and moved in ("", home)
                async for message in websocket:
                    is_text = message.type == aiohttp.WSMsgType.TEXT
                    if is_text and message.json()["type"] == "execution_success":
                        break
            history = await _outcome(page, answer["prompt_id"])
            ((saved,),) = (found["images"] for found in history["outputs"].values() if "images" in found)
            async with page.get("/view", params=saved) as picture:
                assert (await picture.read()).startswith(b"\x89PNG")
            return home

    name = run_in_own_loop(story())
    assert len(_asked(door, name, "/history")) == 1


def test_a_dead_comfyui_s_prompts_are_sent_again_through_it(door, tmp_path, monkeypatch):
    """The command is stopped before it notes that they were sent, and asks for them when it runs again."""
    monkeypatch.setattr(QueueLogFolder, "remove", lambda log, prompt_ids: None)
    names = {str(uuid.uuid4()) for _ in range(3)}
    log, token = QueueLogFolder(tmp_path / "queue"), tmp_path / "token"
    for number, name in enumerate(names):
        log.write(Entry(name, float(number), {"prompt": _picture()}))
    log.close()
    token.write_text(door.tokens[3])
    command = ["resend", str(log.path), "--to", door.url, "--token-file", str(token)]
    command += ["--certificate", str(door.folder / "certificate.pem")]
    assert main(command) == 0
    log = QueueLogFolder(log.path)
    assert all(entry.sending for entry in log.read_open().values())  # the session to ask
    log.close()
    assert main(command) == 0

    def ended() -> list[str]:
        histories = [_asked(door, name, "/history") for name in NAMES]
        return [name for history in histories for name in history if name in names]

    wait_until(lambda: len(ended()) >= 3)
    assert sorted(ended()) == sorted(names)


def test_only_sense_drains_and_haproxy_gets_a_line_without_http(door):
    host, port = door.servers["c"].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as agent:
        agent.sendall(b"GET /parallel_sampling/agent?for=pages HTTP/1.0\r\n\r\n")
        assert agent.makefile().read().startswith("up ")
    drain, agent = "/parallel_sampling/drain", "/parallel_sampling/agent"
    for path, method, body in (
        (drain, "POST", b'{"draining": 1}'),
        (drain, "POST", b"[" * 1000),
        (agent, "GET", None),
        (agent + "?for=all", "GET", None),
    ):
        assert Comfy(door.servers["c"]).request(path, body, method)[0] == 400
    assert _load(door, "c")["takes_prompts"]


@pytest.mark.slow
def test_prompts_survive_a_drain_and_a_kill_on_the_way(door):
    """Programs open a new session for each prompt, and send again what the front door reports as lost."""
    for name in NAMES:
        _drain(door, name, False)
    wait_until(lambda: all(door.state("prompts", name).startswith("UP") for name in NAMES))
    went: list[str] = []
    lost, ended = [], {}

    async def send(token: str, prompt_id: str) -> None:
        while prompt_id not in ended:
            async with door.client(token=token) as client:
                body = {"prompt": _picture(), "prompt_id": prompt_id}
                status, answer, name = await _send(client, body)
                if status != 200:
                    assert status in (502, 503) and answer["error"]
                    lost.append(prompt_id)
                    await asyncio.sleep(0.2)
                    continue
                went.append(name)
                outcome = await _outcome(client, prompt_id)
            if outcome is None:
                lost.append(prompt_id)
                continue
            ended[prompt_id] = outcome["status"]["status_str"]

    async def program(token: str, prompts: list[str]) -> None:
        for prompt_id in prompts:
            await send(token, prompt_id)

    async def flood(token: str) -> set[int]:
        async with door.client(token=token) as client:
            return {(await _send(client, {}))[0] for _ in range(80)}

    async def until(condition) -> None:
        while not condition():
            await asyncio.sleep(0.05)

    async def operator() -> tuple[int, int]:
        await until(lambda: len(ended) > PROMPTS // 4)
        await asyncio.to_thread(_drain, door, "b", True)
        await until(lambda: door.state("prompts", "b").startswith("DOWN"))
        before = len(went)
        await until(lambda: len(ended) > PROMPTS // 2)
        async with contextlib.AsyncExitStack() as sessions:
            home = ""
            while home != "a":
                session = await sessions.enter_async_context(door.client(token=door.tokens[3]))
                async with session.get("/queue") as answer:
                    home = _named(answer.cookies)
            _, answer, _ = await _send(session, {"prompt": _picture(steps=1000)})
            await asyncio.to_thread(door.servers["a"].kill)
            # Reported, instead of another ComfyUI's empty history.
            assert await _outcome(session, answer["prompt_id"]) is None
            # It must not stop another ComfyUI's picture.
            assert await _status(session, "/interrupt", "POST") in (502, 503)
            status, _, moved = await _send(session, {"prompt": _picture()})
            assert (status, moved) == (200, "c")
        return before, went[before:].count("b")

    async def story():
        programs = door.tokens[4:]
        prompts = [str(uuid.uuid4()) for _ in range(PROMPTS)]
        jobs = [program(token, prompts[i :: len(programs)]) for i, token in enumerate(programs)]
        found = await asyncio.gather(operator(), flood(door.tokens[0]), *jobs)
        return prompts, found[0], found[1]

    prompts, (before, after_drain), flooded = run_in_own_loop(story())
    assert set(ended) == set(prompts) and set(ended.values()) == {"success"}
    assert set(went[:before]) == set(NAMES)
    # A prompt that was sent before HAProxy learned of the drain may still arrive.
    assert after_drain <= len(door.tokens) and set(went[-PROMPTS // 8 :]) == {"c"}
    assert flooded <= {400, 429, 502, 503} and 429 in flooded
    drained = _load(door, "b")
    assert (drained["takes_prompts"], drained["refusal"], drained["waiting"]) == (False, "draining", 0)
    _drain(door, "b", False)
    wait_until(lambda: door.state("prompts", "b") == "UP 100")
