"""A ComfyUI is killed with 50 prompts waiting: another one runs them, once each."""

from __future__ import annotations

import json
import urllib.request
import uuid

import pytest

from comfy_harness import start_comfyui
from comfyui_client import ComfyUIClient
from parallel_backend.__main__ import main
from parallel_backend.observability.queue_log import VARIABLE
from waiting import wait_until

WAITING = 50
SECRET = "a key of somebody's"


def _send(url: str, body: dict) -> str:
    request = urllib.request.Request(f"{url}/prompt", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["prompt_id"]


def _queue(client: ComfyUIClient) -> dict[str, set[str]]:
    with urllib.request.urlopen(f"{client.url}/queue", timeout=60) as answer:
        return {kind: {item[1] for item in items} for kind, items in json.load(answer).items()}


@pytest.fixture
def kept(tmp_path):
    """(a ComfyUI with a queue log, the log)."""
    path = tmp_path / "queue.jsonl"
    server = start_comfyui(tmp_path / "first", environment={VARIABLE: str(path)})
    with server:
        yield server, path


def test_a_killed_comfyui_s_prompts_end_once_each_in_another(comfy, kept, tmp_path, capsys):
    server, path = kept
    lines, gate, door = tmp_path / "lines", tmp_path / "gate", tmp_path / "open"
    door.touch()

    def body(line: str, after=gate, **others: object) -> dict:
        inputs = {"line": line, "path": str(lines), "after": str(after)}
        prompt = {"1": {"class_type": "TestAppend", "inputs": inputs}}
        extra = {"api_key_comfy_org": SECRET, "extra_pnginfo": {"workflow": {"of": line}}}
        return {"prompt": prompt, "extra_data": extra, "client_id": "page", **others}

    client = ComfyUIClient(server.url)
    client.wait(_send(server.url, body("ended before", door)))
    running = _send(server.url, body("running"))
    wanted = {line: str(uuid.uuid4()) for line in map("waiting {}".format, range(WAITING))}
    for line, prompt_id in wanted.items():
        assert _send(server.url, body(line, prompt_id=prompt_id)) == prompt_id
    deleted = _send(server.url, body("deleted"))
    client._request("/queue", {"delete": [deleted]})
    found = _queue(client)
    assert (found["queue_running"], found["queue_pending"]) == ({running}, set(wanted.values()))
    wait_until(lambda: path.read_text().count('"ended"') == 2)  # the first, and the deleted one
    assert main(["resend", str(path), "--to", comfy.server.url]) == 2  # while it lives
    assert "is running" in capsys.readouterr().err
    server.kill()

    assert main(["resend", str(path), "--to", comfy.server.url]) == 0
    assert capsys.readouterr().out.endswith(f"{WAITING + 1} prompts sent, 0 left\n")
    assert main(["resend", str(path), "--to", comfy.server.url]) == 0  # nothing is left to send
    gate.touch()
    for prompt_id in (running, *wanted.values()):
        entry = comfy.client.wait(prompt_id)
        assert entry["status"]["status_str"] == "success"
        assert entry["prompt"][3]["extra_pnginfo"] and entry["prompt"][3]["client_id"] == "page"
    assert sorted(lines.read_text().splitlines()) == sorted(["ended before", "running", *wanted])
    assert SECRET not in path.read_text()
