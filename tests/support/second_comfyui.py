"""A second ComfyUI for tests that need two, or one to kill. Its start costs as much as all these tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster_machines import make_cluster
from comfy_harness import Comfy, start_comfyui
from comfyui_client import ComfyUIClient
from comfyui_server import ComfyUIServer, free_port
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.observability.logs import queue_log
from parallel_backend.sidecar.process import device_lock

DEVICES = "cpu:4,cpu:5"  # its ranks start here when it launches, by real starts as outside tests
FOLDER = "parallel.pack v2"  # the pack's folder


@dataclass(frozen=True)
class SecondComfyUI:
    """A ComfyUI that writes a queue log, shares device locks with the first one, and is the head of cluster lab.

    `secret`: the machines' secret file. `port`: the port to which machines connect.
    """

    server: ComfyUIServer
    queue_log: Path
    secret: Path
    port: int

    def running(self) -> Comfy:
        """Returns it running. Starts it if necessary: a test may have killed it."""
        if not self.server.is_started:
            self.server.start()
        return Comfy(server=self.server, client=ComfyUIClient(self.server.url))


def second_comfyui(base: Path, locks: Path) -> SecondComfyUI:
    """Returns a ComfyUI that is not started. `base`: its folder, empty; `locks`: the first ComfyUI's lock folder."""
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    chosen = {"parallel_sampling.start_at_launch": True, "parallel_sampling.default_devices": DEVICES}
    settings.write_text(json.dumps(chosen))
    log, secrets, port = base / "queue.jsonl", base / "secrets", free_port()
    environment = {
        queue_log.VARIABLE: str(log),
        endpoints.VARIABLE: str(secrets),
        device_lock.VARIABLE: str(locks),
        device_lock.CPU_TOO: "on",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(endpoints.VARIABLE, str(secrets))
        secret = make_cluster(secrets, port=port)
    server = start_comfyui(base, pack_folder=FOLDER, environment=environment)
    return SecondComfyUI(server, log, secret, port)
