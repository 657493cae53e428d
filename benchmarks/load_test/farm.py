"""Several real ComfyUIs behind HAProxy with deploy/haproxy.cfg, or without it if it is not installed."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from adversaries.soak import Usage

from comfy_harness import start_comfyui
from comfyui_server import ComfyUIServer
from front_door import FrontDoor, front_door_of
from parallel_backend.observability.logs.event_log import VARIABLE as EVENT_LOG
from parallel_backend.wire.cache_folder import VARIABLE as MEASUREMENTS

from .mix import write_models

NAMES = "abcdefgh"


@dataclass
class Farm:
    """Running ComfyUIs. `door`: None if programs talk to the ComfyUIs directly, in turn."""

    servers: dict[str, ComfyUIServer]
    door: FrontDoor | None
    _turn: Iterator[int] = field(default_factory=itertools.count)

    def client(self) -> aiohttp.ClientSession:
        """Returns a session for one prompt, with the ComfyUI that the front door chooses, or with the next in turn."""
        turn = next(self._turn)
        if self.door is not None:
            return self.door.client(token=self.door.tokens[turn % len(self.door.tokens)])
        return aiohttp.ClientSession(list(self.servers.values())[turn % len(self.servers)].url)

    def usages(self) -> dict[str, Usage]:
        """Returns the usage of each ComfyUI and each rank, by name."""
        found = {}
        for name, server in self.servers.items():
            found[f"ComfyUI {name}"] = Usage.of(server.pid)
            ranks = sorted(one.pid for one in server.children() if _is_rank(one))
            found |= {f"rank {number} of {name}": Usage.of(pid) for number, pid in enumerate(ranks)}
        return found

    def loads(self) -> tuple[int, int]:
        """Returns how often ranks loaded a model while a prompt waited for it, and how often ahead of a prompt."""
        counted = {"sample": 0, "preload": 0}
        for server in self.servers.values():
            loaded = 0
            for line in map(json.loads, (server.base_directory / "ranks.jsonl").read_text().splitlines()):
                loaded += line["event"] == "loaded"
                if line["event"] == "ended" and line["request"] in counted:
                    counted[line["request"]] += loaded
                    loaded = 0
        return counted["sample"], counted["preload"]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "--parent" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def farm(folder: Path, instances: int, arguments: list[str]) -> Iterator[Farm]:
    """Starts `instances` ComfyUIs with these command-line arguments and stops them when the block ends."""
    servers = {}
    for name in NAMES[:instances]:
        base = folder / name
        write_models(base)
        environment = {EVENT_LOG: str(base / "ranks.jsonl"), MEASUREMENTS: str(base / "measured")}
        servers[name] = start_comfyui(base, environment=environment, arguments=arguments)
    haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if haproxy:
        with front_door_of(servers, haproxy, folder) as door:
            yield Farm(servers, door)
        return
    with contextlib.ExitStack() as running:
        # A ComfyUI ends with the thread that started it, so the pool's threads must last as long.
        together = running.enter_context(ThreadPoolExecutor(len(servers)))
        for server in servers.values():
            running.callback(server.stop)
        list(together.map(ComfyUIServer.start, servers.values()))
        yield Farm(servers, None)
