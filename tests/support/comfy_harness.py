"""A real ComfyUI on the CPU with this pack and the inject nodes, and the short ways tests need into and out of it."""

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
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from safetensors.torch import load_file

from comfyui_client import ComfyUIClient, Events, Prompt
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from graphs import ON_GPU
from tiny_flux import write_tiny_flux

ROOT = Path(__file__).resolve().parents[2]

# A name that breaks a pack which builds module names or command lines from its folder.
PACK_FOLDER = "My Pack v1.0"


@dataclass
class Comfy:
    """A running ComfyUI: run prompts, get latents and text back, put model files in place."""

    server: ComfyUIServer
    client: ComfyUIClient
    _names: itertools.count = field(default_factory=itertools.count)

    @cached_property
    def registry(self) -> dict[str, dict]:
        """What ComfyUI says of each node; the files in its lists are those that were there at the first look."""
        return self.client.object_info()

    def run(self, prompt: Prompt, timeout: float = 120) -> dict:
        """Run a prompt in API format; returns its history entry, raises what the client raises."""
        return self.client.run(prompt, timeout)

    def sample(self, prompt: Prompt, latent: list, timeout: float = 120) -> torch.Tensor:
        """Run ``prompt`` and return the samples of its LATENT output ``latent`` (``[node id, slot]``)."""
        name = f"test-latent-{next(self._names)}.safetensors"
        save = {"class_type": "TestSaveLatent", "inputs": {"latent": latent, "path": name}}
        self.run({**prompt, "save-latent": save}, timeout)
        return load_file(self.output(name))["samples"]

    def sample_with_text(
        self, prompt: Prompt, latent: list, text: list, timeout: float = 120
    ) -> tuple[torch.Tensor, str]:
        """As :meth:`sample`, and the STRING output ``text`` with it."""
        name = f"test-text-{next(self._names)}.txt"
        save = {"class_type": "TestSaveText", "inputs": {"text": text, "path": name}}
        samples = self.sample({**prompt, "save-text": save}, latent, timeout)
        return samples, self.output(name).read_text()

    def forget(self) -> None:
        """Has ComfyUI forget the outputs and models that it keeps. It may miss the wish until its next prompt ends."""
        self.client.free()
        self.run(
            {"forgotten": {"class_type": "TestSaveText", "inputs": {"text": "", "path": "forgotten.txt"}}}
        )

    @contextmanager
    def amid(self, node: str, act: Callable[[], object]) -> Iterator[Events]:
        """Inside, ``act()`` is called once, in the midst of this node's work: after its third step."""
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
        """The living ranks."""

        def is_rank(process: psutil.Process) -> bool:
            try:
                return "--parent" in process.cmdline()
            except psutil.NoSuchProcess:
                return False

        return list(filter(is_rank, self.server.children()))

    def request(
        self, path: str, body: object = None, method: str = "POST", **headers: str
    ) -> tuple[int, str]:
        """(status, the answer's text); `body`: bytes, or what becomes JSON."""
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
        """As `request`, with what the answer's JSON says, if it is some."""
        status, text = self.request(path, body, method, **headers)
        return status, json.loads(text) if text.startswith("{") else {}

    def groups(self) -> list[dict]:
        """What the route of ranks says of each group."""
        return self.ask("/parallel_sampling/ranks", method="GET")[1]["groups"]

    def stop_ranks(self) -> None:
        """Ends the groups that tests before have left, as a person does it."""
        self._press("stop")

    def allow_restarts(self) -> None:
        """Has groups that failed too often start again, as a person does it."""
        self._press("reset")

    def _press(self, action: str) -> None:
        for group in self.groups():
            if not group["why_not"][action]:
                status, said = self.ask(f"/parallel_sampling/ranks/{action}", {"devices": group["devices"]})
                assert status == 200, said

    def output(self, name: str) -> Path:
        """The path of a file that a node saved under ``name``."""
        return self.server.output_directory / name

    def write_flux(self, name: str, **options: object) -> str:
        """Write a tiny Flux among ComfyUI's diffusion models unless it is there; returns the loader's file name."""
        path = self.server.base_directory / "models" / "diffusion_models" / name
        if not path.exists():
            write_tiny_flux(path, **options)
        return name


def require_comfyui() -> Path:
    """The real ComfyUI's folder; without one the test is skipped, and in CI it fails."""
    folder = find_comfyui()
    if folder is None:
        reason = "no real ComfyUI found: run ./scripts/test, or set COMFYUI_PATH"
        (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true", "yes") else pytest.skip)(reason)
    return folder


def start_comfyui(
    base_directory: Path, *, pack_folder: str = PACK_FOLDER, comfyui: Path | None = None, **options: object
) -> ComfyUIServer:
    """A ComfyUI (not started yet) with this pack and the inject nodes; for tests that need one of their own.
    `comfyui`: its folder, where it is not the real one's."""
    packs = {pack_folder: ROOT, "parallel_test_nodes": ROOT / "tests" / "comfy" / "inject_nodes"}
    arguments = ["--preview-method", "latent2rgb", *options.pop("arguments", [])]
    environment = {"OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    arguments += os.environ.get(ON_GPU, "").split()
    cpu = options.pop("cpu", ON_GPU not in os.environ)
    if not cpu:
        environment.pop("PARALLEL_TEST_FORKED_RANKS", None)  # a fork sees no GPU
    return ComfyUIServer(
        comfyui or require_comfyui(),
        base_directory,
        packs,
        cpu=cpu,
        arguments=arguments,
        environment=environment,
        **options,
    )
