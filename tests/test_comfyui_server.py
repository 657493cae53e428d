"""The real ComfyUI as tests and demo start it."""

from __future__ import annotations

import socket

import comfyui_server
from comfy_harness import start_comfyui
from comfyui_client import ComfyUIClient


def test_a_port_that_was_taken_meanwhile_costs_another_try(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = comfyui_server._free_port
        ports = [taken.getsockname()[1], free()]
        monkeypatch.setattr(comfyui_server, "_free_port", lambda: ports.pop(0))
        with start_comfyui(tmp_path) as server:
            assert ports == []
            assert "ParallelSampler" in ComfyUIClient(server.url).object_info()
    assert server.survivors == []
