"""Starting ComfyUI for the tests and the demo: if another process takes the port meanwhile, another one is tried."""

from __future__ import annotations

import socket
import subprocess
import textwrap

import psutil
import pytest

import comfyui_server
from comfyui_server import ComfyUIServer
from steps import SetupError
from waiting import wait_until

# Ends with ComfyUI's message if the port is taken, and otherwise answers on it.
MAIN = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
class Server(http.server.HTTPServer):
    allow_reuse_address = False
try:
    server = Server(("127.0.0.1", port), Answer)
except OSError:
    sys.exit(f"Port {port} is already in use on address 127.0.0.1.")
server.serve_forever()
"""


@pytest.fixture
def taken():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # without listen(), so that a connection to it is refused at once
        yield held.getsockname()[1]


@pytest.fixture
def server(tmp_path):
    (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
    return ComfyUIServer(tmp_path, tmp_path / "base", {}, cpu=True)


def test_another_port_is_tried(server, taken, monkeypatch):
    ports = [taken, taken, comfyui_server.free_port()]
    monkeypatch.setattr(comfyui_server, "free_port", lambda: ports.pop(0))
    with server:
        assert ports == []
    assert server.survivors == []


def test_a_machine_without_afree_port_is_told_so(server, taken, monkeypatch):
    monkeypatch.setattr(comfyui_server, "free_port", lambda: taken)
    with pytest.raises(SetupError, match="already in use"):
        server.start()


def test_a_process_that_has_ended_is_not_left_behind_and_one_that_runs_is(server, monkeypatch):
    """The system may take a while to clear away a process whose parent has ended before it."""
    ended, running = (subprocess.Popen(["sleep", seconds]) for seconds in ("0", "60"))
    children = [psutil.Process(one.pid) for one in (ended, running)]
    wait_until(lambda: children[0].status() == psutil.STATUS_ZOMBIE)
    monkeypatch.setattr(comfyui_server.psutil, "wait_procs", lambda processes, timeout: ([], processes))
    try:
        with server:
            monkeypatch.setattr(server, "children", lambda: children)
        assert server.survivors == ["sleep 60"]
    finally:
        ended.wait()
        running.kill()
        running.wait()
