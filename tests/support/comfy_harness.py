"""A real ComfyUI on the CPU with this pack and the inject nodes, with shortcuts for the inputs and outputs of tests."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from safetensors.torch import load_file

from comfyui_client import ComfyUIClient, Events, Prompt
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from forked_ranks import ForkedProcess, ForkedSubprocess
from graphs import ON_GPU, node
from parallel_backend.sidecar.group import supervisor
from scripted import processes_with
from tiny_flux import write_tiny_flux

ROOT = Path(__file__).resolve().parents[2]

# This name breaks a pack that builds module names or command lines from its folder.
PACK_FOLDER = "My Pack v1.0"


@dataclass
class Comfy:
    """A running ComfyUI: it runs prompts, returns latents and text, and stores model files."""

    server: ComfyUIServer
    client: ComfyUIClient = field(init=False)
    _names: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.client = ComfyUIClient(self.server.url)

    @cached_property
    def registry(self) -> dict[str, dict]:
        """ComfyUI's description of each node (/object_info). It is read once: its lists have the files of that time."""
        return self.client.object_info()

    def run(self, prompt: Prompt, timeout: float = 120) -> dict:
        """Runs a prompt in API format and returns its history entry. Raises the client's errors."""
        return self.client.run(prompt, timeout)

    def sample(self, prompt: Prompt, value: list, timeout: float = 120) -> torch.Tensor:
        """Runs `prompt` and returns the tensor of its LATENT or IMAGE output `value` ([node id, slot])."""
        name = f"test-{next(self._names)}.safetensors"
        self.run({**prompt, "save": node("TestSave", value=value, path=name)}, timeout)
        return self.tensor(name)

    def forget(self) -> None:
        """Makes ComfyUI drop its cached outputs and models. It may do so only after another prompt, so one is run."""
        self.client.free()
        self.run({"forgotten": node("TestSaveText", text="", path="forgotten.txt")})

    @contextmanager
    def amid(self, node: str, act: Callable[[], object]) -> Iterator[Events]:
        """Calls `act()` once, in the middle of this node's work inside the `with` block: after its third step."""
        ended = threading.Event()

        def watch() -> None:
            while max(events.of_node(node), default=0) < 3:
                if ended.wait(0.01):
                    return
            act()

        with self.client.listen() as events:
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                yield events
            finally:
                ended.set()
                watcher.join()

    def ranks(self) -> list[psutil.Process]:
        """Returns the running ranks."""
        return processes_with("--parent", str(self.server.pid))

    def request(
        self, path: str, body: object = None, method: str = "POST", **headers: str
    ) -> tuple[int, str]:
        """Sends a request and returns (status, the answer's text). `body`: bytes, or a value to send as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        address = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=240)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask(self, path: str, body: object = None, method: str = "POST", **headers: str) -> tuple[int, dict]:
        """Sends a request and returns (status, the answer's JSON object). The object is empty if the answer is none."""
        status, text = self.request(path, body, method, **headers)
        return status, json.loads(text) if text.startswith("{") else {}

    def logged(self) -> list[dict]:
        """Returns the lines of the jobs' log."""
        path = self.server.base_directory / "ranks.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def groups(self) -> list[dict]:
        """Returns what the ranks route reports about each group."""
        return self.ask("/parallel_sampling/ranks", method="GET")[1]["groups"]

    def stop_ranks(self) -> None:
        """Ends the groups that earlier tests left running, through the route that the page's button uses."""
        self._press("stop")

    def allow_restarts(self) -> None:
        """Allows groups that failed too often to start again, through the route that the page's button uses."""
        self._press("reset")

    def _press(self, action: str) -> None:
        for group in self.groups():
            if not group["why_not"][action]:
                status, said = self.ask(f"/parallel_sampling/ranks/{action}", {"devices": group["devices"]})
                assert status == 200, said

    def output(self, name: str) -> Path:
        """Returns the path of a file that a node saved under `name`."""
        return self.server.output_directory / name

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the tensor of a LATENT or an IMAGE that a node saved under `name`."""
        return load_file(self.output(name))["tensor"]

    def models(self, kind: str = "diffusion_models") -> Path:
        """Returns the folder of ComfyUI's model files of one kind, after creating it."""
        folder = self.server.base_directory / "models" / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_flux(self, name: str, **options: object) -> str:
        """Writes a tiny Flux into ComfyUI's diffusion models unless it exists; returns its file name for the loader."""
        path = self.models() / name
        if not path.exists():
            write_tiny_flux(path, **options)
        return name


class ForkedComfyUI(ComfyUIServer):
    """A ComfyUI that starts as a fork of this process's fork server (forked_comfyui.py)."""

    def _launch(self, command: list[str], log: BinaryIO) -> ForkedProcess:
        program, *arguments = command
        command = [program, "-m", "tests.support.forked_comfyui", *arguments]
        return supervisor.subprocess.fork(command, self._environment, log.fileno())


def require_comfyui() -> Path:
    """Returns the real ComfyUI's folder. If there is none, the test is skipped, or fails in CI."""
    folder = find_comfyui()
    if folder is None:
        reason = "no real ComfyUI found: run ./scripts/test, or set COMFYUI_PATH"
        (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true", "yes") else pytest.skip)(reason)
    return folder


def start_comfyui(
    base_directory: Path, *, pack_folder: str = PACK_FOLDER, comfyui: Path | None = None, **options: object
) -> ComfyUIServer:
    """Returns a ComfyUI, not started yet, with this pack and the inject nodes, for tests that need a separate one.
    `comfyui`: the folder of its code, if it is not the usual one."""
    packs = {pack_folder: ROOT, "parallel_test_nodes": ROOT / "tests" / "comfy" / "inject_nodes"}
    arguments = ["--preview-method", "latent2rgb", *options.pop("arguments", [])]
    environment = {"OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    arguments += os.environ.get(ON_GPU, "").split()
    cpu = options.pop("cpu", ON_GPU not in os.environ)
    if not cpu:
        environment.pop("PARALLEL_TEST_FORKED_RANKS", None)  # a fork sees no GPU
    is_forked = "PARALLEL_TEST_FORKED_RANKS" in environment and isinstance(
        supervisor.subprocess, ForkedSubprocess
    )
    return (ForkedComfyUI if is_forked else ComfyUIServer)(
        comfyui or require_comfyui(),
        base_directory,
        packs,
        cpu=cpu,
        arguments=arguments,
        environment=environment,
        **options,
    )
