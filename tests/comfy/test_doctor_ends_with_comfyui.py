"""The doctor that the page's button starts ends at once if ComfyUI is killed during its work."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import urllib.request

import psutil
import pytest

from comfy_harness import start_comfyui
from scripted import is_running
from waiting import wait_until

PATIENCE = 2.0  # s; without the kill the doctor would run some seconds longer


@pytest.mark.timeout(300)
def test_no_doctor_outlives_a_killed_comfyui(tmp_path):
    server = start_comfyui(tmp_path)

    def press() -> None:
        request = urllib.request.Request(f"{server.url}/parallel_sampling/doctor", method="POST", data=b"")
        with contextlib.suppress(http.client.HTTPException, OSError):
            urllib.request.urlopen(request, timeout=240).read()  # a client that leaves ends it as well

    def command_lines() -> list[str]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [" ".join(child.cmdline()) for child in server.children()]
        return []

    with server:
        button = threading.Thread(target=press, daemon=True)
        button.start()
        wait_until(lambda: any("parallel_backend.rank" in line for line in command_lines()), 120)
        children = server.children()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(child.pid) for child in children), PATIENCE)
        button.join(10)
    assert not button.is_alive()  # the request has ended
