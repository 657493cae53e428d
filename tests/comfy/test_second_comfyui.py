"""Two ComfyUIs on one machine use separate devices. If one is killed, its ranks end and its prompts survive."""

from __future__ import annotations

import uuid

import pytest
import torch

from comfy_harness import Comfy
from comfyui_client import PromptFailed
from graphs import Graph
from parallel_backend.__main__ import main
from waiting import wait_until

APART = ("cpu:0,cpu:1", "cpu:2,cpu:3")
UNET = "tiny_dev.safetensors"
WAITING = 50
SECRET = "a key of somebody's"


def _sampled(comfy, devices: tuple[str, ...], seed: int) -> torch.Tensor:
    """Chains one sampler per entry of `devices`, each on those devices, and returns the last latent."""
    graph = Graph()
    texts, latent = (graph.text(1), graph.text(2)), graph.latent()
    for index, names in enumerate(devices):
        loader = graph.parallel_loader(comfy.write_flux(UNET), names, ulysses=2)
        latent = graph.parallel_sampler(loader, *texts, latent, seed=seed + index)
    return comfy.sample(graph.prompt, latent)


def _pids(comfy) -> set[int]:
    return {process.pid for process in comfy.ranks()}


def test_ranks_start_with_comfyui_where_that_is_set(comfy, second):
    other = second.running()
    wait_until(lambda: len(_pids(other)) == 2)  # before any prompt
    started = _pids(other)
    assert torch.equal(_sampled(other, (second.devices,), seed=41), _sampled(comfy, (APART[0],), seed=41))
    assert _pids(other) == started


def test_two_device_sets_in_one_graph_stay_warm_and_another_comfyui_is_told_who_has_them(comfy, second):
    _sampled(comfy, APART, seed=1)
    warm = _pids(comfy)
    assert len(warm) == 4
    _sampled(comfy, APART, seed=11)
    assert _pids(comfy) == warm
    other = second.running()
    with pytest.raises(PromptFailed, match=rf"in use .*process {comfy.server.pid}, since"):
        _sampled(other, APART[1:], seed=1)
    _sampled(other, (second.devices,), seed=1)
    assert len(_pids(other)) == 2 and _pids(comfy) == warm


def _send(comfy: Comfy, body: dict) -> str:
    return comfy.ask("/prompt", body)[1]["prompt_id"]


def _queue(comfy: Comfy) -> dict[str, set[str]]:
    queue = comfy.ask("/queue", method="GET")[1]
    return {kind: {item[1] for item in items} for kind, items in queue.items()}


def test_a_killed_comfyuis_ranks_end_and_its_prompts_run_once_each_in_another(
    comfy, second, tmp_path, capsys
):
    """It is killed by SIGKILL with warm ranks and 50 waiting prompts. Last, because the second one must restart."""
    other, log = second.running(), second.queue_log
    lines, gate, door = tmp_path / "lines", tmp_path / "gate", tmp_path / "open"
    door.touch()
    expected = _sampled(comfy, (APART[0],), seed=42)
    kept = _pids(comfy)
    assert torch.equal(_sampled(other, (second.devices,), seed=42), expected)
    assert len(_pids(other)) == 2

    def body(line: str, after=gate, **others: object) -> dict:
        inputs = {"line": line, "path": str(lines), "after": str(after)}
        prompt = {"1": {"class_type": "TestAppend", "inputs": inputs}}
        extra = {"api_key_comfy_org": SECRET, "extra_pnginfo": {"workflow": {"of": line}}}
        return {"prompt": prompt, "extra_data": extra, "client_id": "page", **others}

    client, server = other.client, second.server
    client.wait(_send(other, body("ended before", door)))
    running = _send(other, body("running"))
    wanted = {line: str(uuid.uuid4()) for line in map("waiting {}".format, range(WAITING))}
    for line, prompt_id in wanted.items():
        assert _send(other, body(line, prompt_id=prompt_id)) == prompt_id
    deleted = _send(other, body("deleted"))
    client._request("/queue", {"delete": [deleted]})
    found = _queue(other)
    assert (found["queue_running"], found["queue_pending"]) == ({running}, set(wanted.values()))
    wait_until(lambda: len(list(log.glob("*.json"))) == 1 + WAITING)
    assert main(["resend", str(log), "--to", comfy.server.url]) == 2  # refused while it runs
    assert "is running" in capsys.readouterr().err
    server.kill()
    assert server.survivors == []
    assert SECRET not in "".join(file.read_text() for file in log.iterdir())

    assert main(["resend", str(log), "--to", comfy.server.url]) == 0
    assert capsys.readouterr().out.endswith(f"{WAITING + 1} prompts sent, 0 left\n")
    assert main(["resend", str(log), "--to", comfy.server.url]) == 0  # nothing is left to send
    gate.touch()
    for prompt_id in (running, *wanted.values()):
        entry = comfy.client.wait(prompt_id)
        assert entry["status"]["status_str"] == "success"
        assert entry["prompt"][3]["extra_pnginfo"] and entry["prompt"][3]["client_id"] == "page"
    assert sorted(lines.read_text().splitlines()) == sorted(["ended before", "running", *wanted])
    # The ranks of the first ComfyUI were not affected.
    assert torch.equal(_sampled(comfy, (APART[0],), seed=42), expected) and _pids(comfy) == kept
