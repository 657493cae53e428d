"""Starting ComfyUI for the tests and the demo: if another process takes the port meanwhile, another one is tried."""

from __future__ import annotations

import socket
import textwrap

import pytest

import comfyui_server
from comfyui_server import ComfyUIServer
from steps import SetupError

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
