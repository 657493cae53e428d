"""HAProxy with deploy/haproxy.cfg in front of real ComfyUIs, and clients of it."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import secrets
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from comfy_harness import ROOT
from comfyui_server import ComfyUIServer, free_port
from waiting import wait_until

DEPLOY = ROOT / "deploy"
PERSON, PASSWORD = "anna", "a sound password"
PROGRAMS = 12


@dataclass(frozen=True)
class FrontDoor:
    """A running HAProxy with its ComfyUIs. `tokens`: bearer tokens of the programs."""

    url: str
    metrics: str
    folder: Path
    servers: dict[str, ComfyUIServer]
    tokens: tuple[str, ...]

    def client(
        self, *, token: str = "", person: bool = False, source: str = "127.0.0.1"
    ) -> aiohttp.ClientSession:
        """Returns a session with separate cookies that connects from the local address `source`."""
        words = f"Bearer {token}" if token else ""
        if person:
            words = f"Basic {base64.b64encode(f'{PERSON}:{PASSWORD}'.encode()).decode()}"
        trust = ssl.create_default_context(cafile=self.folder / "certificate.pem")
        return aiohttp.ClientSession(
            self.url,
            headers={"Authorization": words} if words else {},
            connector=aiohttp.TCPConnector(ssl=trust, local_addr=(source, 0)),
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # also takes cookies from a host that is an IP address
        )

    def state(self, backend: str, name: str) -> str:
        """Returns HAProxy's state of a server, such as `UP`, `MAINT` or `DOWN (agent)`, and its weight."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.folder / "admin.sock"))
            admin.sendall(b"show stat\n")
            rows = list(csv.DictReader(admin.makefile()))
        row = next(row for row in rows if (row["# pxname"], row["svname"]) == (backend, name))
        return f"{row['status']} {row['weight']}"


def require_haproxy() -> str:
    """Returns HAProxy's path. Skips the test if it is not installed."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is None:
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")
    return found


@contextlib.contextmanager
def front_door_of(servers: dict[str, ComfyUIServer], haproxy: str, folder: Path) -> Iterator[FrontDoor]:
    """Starts these ComfyUIs and yields HAProxy in front of them. The end of the block stops them and kills leftover
    processes. `haproxy`: path of the program."""
    tokens = tuple(secrets.token_hex(16) for _ in range(PROGRAMS))
    with contextlib.ExitStack() as running:
        # Its threads must live as long as the ComfyUIs: each ComfyUI ends with the thread that started it.
        together = running.enter_context(ThreadPoolExecutor(len(servers)))
        running.callback(lambda: list(together.map(ComfyUIServer.stop, servers.values())))
        list(together.map(ComfyUIServer.start, servers.values()))
        _write_secrets(folder, tokens)
        door, metrics = free_port(), free_port()
        process = running.enter_context(_haproxy(haproxy, folder, servers, door, metrics))
        found = FrontDoor(
            f"https://127.0.0.1:{door}", f"http://127.0.0.1:{metrics}/metrics", folder, servers, tokens
        )

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "haproxy.log").read_text()
            if not (folder / "admin.sock").exists():
                return False
            return all(found.state("prompts", name) == "UP 100" for name in servers)

        wait_until(is_ready)
        yield found


@contextlib.contextmanager
def _haproxy(
    program: str, folder: Path, servers: dict[str, ComfyUIServer], door: int, metrics: int
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "FRONT_DOOR": f"127.0.0.1:{door}",
        "FRONT_DOOR_FILES": str(folder),
        "FRONT_DOOR_RUN": str(folder),
        "FRONT_DOOR_METRICS": f"127.0.0.1:{metrics}",
    }
    for name, server in servers.items():
        host, port = server.url.removeprefix("http://").split(":")
        environment |= {f"COMFYUI_{name.upper()}": host, f"COMFYUI_{name.upper()}_PORT": port}
    (folder / "haproxy.cfg").write_text(_configuration(list(servers)))
    command = [program, "-db", "-f", str(folder / "haproxy.cfg"), "-f", str(folder / "people.cfg")]
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _configuration(names: list[str]) -> str:
    """Returns deploy/haproxy.cfg with `server` lines for these ComfyUIs in place of its three."""
    lines = []
    for line in (DEPLOY / "haproxy.cfg").read_text().splitlines():
        if not line.startswith("    server "):
            lines.append(line)
        elif line.startswith("    server a "):
            lines += [
                line.replace("COMFYUI_A", f"COMFYUI_{n.upper()}").replace(" a ", f" {n} ") for n in names
            ]
    return "\n".join(lines) + "\n"


def _write_secrets(folder: Path, tokens: tuple[str, ...]) -> None:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    of_host = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    request = ["openssl", "req", "-x509", *made, *of_host]
    subprocess.run(request, check=True, capture_output=True)
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    hashed = subprocess.run(["openssl", "passwd", "-5", PASSWORD], check=True, capture_output=True, text=True)
    people = (DEPLOY / "people.cfg").read_text()
    (folder / "people.cfg").write_text(f"{people}  user {PERSON} password {hashed.stdout.strip()}\n")
    lines = [f"{hashlib.sha256(token.encode()).hexdigest()} program{i}\n" for i, token in enumerate(tokens)]
    (folder / "tokens.map").write_text((DEPLOY / "tokens.map").read_text() + "".join(lines))
