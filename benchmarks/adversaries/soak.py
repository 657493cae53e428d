"""Many mixed prompts in one ComfyUI: memory, descriptors and threads of ComfyUI and its ranks must level off.

A round has every kind of prompt once: several sizes, samplers, strategies and models, a refused prompt, a cancelled one
and a decode. The first third of the rounds warms up. Growth from the middle third to the last third is a leak.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from any_graphs import AnyGraph
from comfy_harness import Comfy
from comfyui_client import PromptError, PromptFailed, PromptInterrupted
from graphs import Graph
from tiny_vae import FLUX, write_vae

from .descriptors import CLIENTS, added, kinds_of
from .findings import Findings

DEADLINE = 120.0  # s for a prompt, a load included
FEWEST_ROUNDS = 9  # three in each third, so that a connection that is closing in one round is no leak
GROWTH = 0.02  # share by which memory may grow from the middle third to the last: heaps fluctuate
MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """Resources of one process. `memory`: anonymous bytes (RssAnon), without mapped files; `descriptors`: their number
    without connections that clients keep open; `kinds`: the number of all descriptors, by kind."""

    memory: int
    descriptors: int
    threads: int
    kinds: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = {
            line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1
        }
        kinds = kinds_of(pid)
        return cls(
            memory=int(numbers["RssAnon"]) * 1024,
            descriptors=kinds.total() - kinds[CLIENTS],
            threads=int(numbers["Threads"]),
            kinds=kinds,
        )


def soak(comfy: Comfy, rounds: int, findings: Findings) -> None:
    """Runs `rounds` rounds of mixed prompts, at least FEWEST_ROUNDS, and reports what grew."""
    comfy.client.free()  # the models of earlier prompts
    seen: dict[str, list[Usage]] = {}
    prompts = _Mixed(comfy)
    pids: dict[str, int] = {}
    for number in range(max(FEWEST_ROUNDS, rounds)):
        for name, run in prompts.round(seed=number):
            findings.prompts += 1
            try:
                run()
            except TimeoutError:
                findings.add("hangs", f"soak, {name}")
            except PromptError as error:
                findings.add("wrong", f"soak, {name}: {error}")
        comfy.client.clear_history()  # otherwise ComfyUI's record of past prompts grows
        now = _processes(comfy)
        if number and now != pids:
            findings.add("wrong", f"soak: other processes after round {number}: {now} for {pids}")
        pids = now
        for name, pid in pids.items():
            seen.setdefault(name, []).append(Usage.of(pid))
    for name, usages in seen.items():
        for grown in growth(usages):
            findings.add("leaks", f"soak, {name}: {grown}")


def growth(usages: list[Usage]) -> Iterator[str]:
    """Yields in words what grew from the middle third of `usages` to the last third; nothing if all levelled off."""
    third = len(usages) // 3
    middle, last = usages[third : 2 * third], usages[-third:]

    def medians(of: Callable[[Usage], int]) -> tuple[float, float]:
        return median(map(of, middle)), median(map(of, last))

    before, after = medians(lambda usage: usage.memory)
    if after > before * (1 + GROWTH):
        yield f"memory {before / MIB:.1f} -> {after / MIB:.1f} MiB in {third} rounds"
    for name in ("descriptors", "threads"):
        before, after = medians(lambda usage, name=name: getattr(usage, name))
        if after > before:
            words = f"{name} {before:g} -> {after:g} in {third} rounds"
            kinds = added(middle[-1].kinds, last[-1].kinds) if name == "descriptors" else ""
            yield f"{words}: {kinds}" if kinds else words


def _processes(comfy: Comfy) -> dict[str, int]:
    ranks = sorted(rank.pid for rank in comfy.ranks())
    return {"ComfyUI": comfy.server.pid} | {f"rank {number}": pid for number, pid in enumerate(ranks)}


class _Mixed:
    """The prompts of a round, all on cpu:2."""

    def __init__(self, comfy: Comfy) -> None:
        self._comfy = comfy
        self._unet = comfy.write_flux("tiny_stages.safetensors", double_blocks=2, single_blocks=2)
        vae = comfy.server.base_directory / "models" / "vae" / "soak.safetensors"
        vae.parent.mkdir(parents=True, exist_ok=True)
        self._vae = write_vae(vae, FLUX).name

    def round(self, seed: int) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields (name, function that runs it) for each prompt. A new `seed` keeps ComfyUI from using its cache."""
        for number, choice in enumerate(
            (
                {"ulysses": 2},
                {"ring": 2},
                {"cfg": 2},
                {"data": 2},
                {"pipefusion": 2},
                {"ulysses": 2, "shard_weights": True},
            )
        ):
            yield str(choice), self._running(self._sampled(seed, number, choice))
        for sampler in ("dpmpp_sde", "euler"):
            yield f"stock sampler, {sampler}", self._running(self._stock_sampled(seed, sampler))
        for kind, choice in (
            ("wan_t2v", {"ulysses": 2}),
            ("sd3", {"ring": 2}),
            ("hunyuan_video", {"cfg": 2}),
        ):
            yield f"{kind} {choice}", self._running(self._parallel_model(kind, seed, choice))
        yield "a decode", self._running(self._decode(seed))
        yield "a prompt of another width", self._refused(seed)
        yield "a cancel", self._cancelled(seed)

    def _running(self, graph: Graph) -> Callable[[], object]:
        return lambda: self._comfy.run(graph.prompt, timeout=DEADLINE)

    def _refused(self, seed: int) -> Callable[[], object]:
        def run() -> None:
            try:
                self._comfy.run(self._sampled(seed, 0, {"ulysses": 2}, width=32).prompt, timeout=DEADLINE)
            except PromptFailed:
                return
            raise PromptError("a prompt of another width was not refused")

        return run

    def _cancelled(self, seed: int) -> Callable[[], object]:
        def run() -> None:
            client = self._comfy.client
            with client.listen() as events:
                name = client.queue(self._sampled(seed, 1, {"ulysses": 2}, steps=2000).prompt)
                deadline = time.monotonic() + DEADLINE
                while not events.progress and time.monotonic() < deadline:
                    time.sleep(0.01)
                client.interrupt()
                try:
                    client.wait(name, DEADLINE)
                except PromptInterrupted:
                    return
            raise PromptError("a prompt of 2000 steps was not cancelled")

        return run

    def _sampled(self, seed: int, number: int, choice: dict, width: int = 64, steps: int = 2) -> Graph:
        graph = Graph()
        latent = graph.latent(width=(8, 14, 9)[number % 3], height=(6, 11)[number % 2], batch=1 + number % 2)
        sampler = ("euler", "heun", "dpmpp_2m", "euler_ancestral")[number % 4]
        result = graph.parallel_sampler(
            graph.parallel_loader(self._unet, "cpu:2", **choice),
            graph.text(1, width=width), graph.text(2, width=width), latent,
            seed=seed, steps=steps, cfg=1.0 + 2 * (number % 2), sampler_name=sampler,
        )  # fmt: skip
        graph.save(result, "soak.safetensors")
        return graph

    def _stock_sampled(self, seed: int, sampler: str) -> Graph:
        graph = Graph()
        request = graph.text(1), graph.text(2), graph.latent(width=8, height=6)
        model = graph.model("ours", self._unet, ulysses=2)
        graph.save(
            graph.ksampler(model, *request, seed=seed, steps=2, cfg=3.0, sampler_name=sampler),
            "soak.safetensors",
        )
        return graph

    def _parallel_model(self, kind: str, seed: int, choice: dict) -> Graph:
        graph = AnyGraph(self._comfy, kind)
        ours = [graph.parallel(graph.stock(), **choice), 0]
        graph.save(
            graph.ksampler(ours, *graph.request(1 + seed % 2), seed=seed, steps=2, cfg=3.0),
            "soak.safetensors",
        )
        return graph

    def _decode(self, seed: int) -> Graph:
        graph = Graph()
        vae = [graph.add("VAELoader", vae_name=self._vae), 0]
        image = graph.add(
            "ParallelVAEDecode", samples=graph.latent(width=16, height=12, draw=seed), vae=vae,
            strategy=graph.strategy("cpu:2"),
        )  # fmt: skip
        graph.save([image, 0], "soak-image.safetensors")
        return graph
