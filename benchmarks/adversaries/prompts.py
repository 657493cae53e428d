"""Hostile prompts for the real ComfyUI: working graphs in which some inputs are replaced by values that do not fit.

About half of the graphs sample a Flux. The others run PipeFusion on other families, a GGUF file, a batch over devices,
and models changed by nodes of other packs.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

import gguf_files
from any_graphs import AnyGraph, write_model
from comfy_harness import Comfy
from comfyui_client import PromptError, PromptFailed, PromptRejected
from graphs import Graph

from .findings import Findings

# Errors of code that did not check its input.
BARE = (
    "AttributeError",
    "TypeError",
    "IndexError",
    "KeyError",
    "OverflowError",
    "AssertionError",
    "UnboundLocalError",
)
OURS = ("Parallel", "Strategy")
PIPELINES = ("wan_t2v", "ltx_video", "sd3")
# Nodes of the tests' packs (tests/comfy/inject_packs) for a Flux, with their settings.
PACKS = {
    "TestBlockClosure": {"blocks": "single_blocks", "weight": 0.5},
    "TestAttentionKernel": {},
    "TestStepCache": {"limit": 0.3, "on_the_edge": False},
}
CHANGED = (*OURS, "KSampler", *PACKS)  # nodes whose inputs are replaced, by the start of their names
FAULTS = {"on_the_edge"}  # inputs that make one rank compute something else; the tests of packs cover them
DEADLINE = 60.0  # s for a prompt of three small steps, once its ranks run
CHECK_EVERY = 20  # after this many prompts, a working prompt must still give the same latent, bit for bit

LITERALS = (
    None, "", "x" * 5000, "../../etc/passwd", "cpu:2", "\x00", "ä" * 300, -1, 0, 1, 3.5, 2**31, 2**63, 2**64 - 1, 2**70,
    -(2**63), 1e308, -0.0, True, False, [], {}, [1, 2, 3], {"a": {}}, ["TestLatent0"], ["nothing", 0],
    ["TestLatent0", 9], ["TestLatent0", -1], [["a"]], "nan", "1e999", "cuda:0", "cpu:0,cpu:0", "cpu:99", "all,all",
)  # fmt: skip


class Files:
    """The model files that the graphs load."""

    def __init__(self, comfy: Comfy) -> None:
        self.comfy = comfy
        self.flux = comfy.write_flux("tiny_dev.safetensors")
        self.families = {kind: write_model(comfy, kind) for kind in ("flux", *PIPELINES)}
        folder = comfy.server.base_directory / "models" / "diffusion_models"
        self.gguf = "tiny_packed.gguf"
        gguf_files.write(folder / self.gguf, "Q4_0", tensors=load_file(folder / self.flux))

    def draw(self, draw: random.Random) -> Graph:
        """Returns a random working graph that saves its latent."""
        kinds = {_flux: 5, _pipeline: 2, _gguf: 1, _batch: 1, _packs: 2}
        (kind,) = draw.choices(list(kinds), list(kinds.values()))
        graph, result = kind(self, draw)
        graph.save(result, "fuzzed.safetensors")
        return graph


def _flux(files: Files, draw: random.Random) -> tuple[Graph, list]:
    graph = Graph()
    is_plain = draw.random() < 0.5
    positive, negative, latent = graph.text(1), graph.text(2), graph.latent(width=8, height=6)
    sizes = draw.random()
    if sizes < 0.1:
        graph.prompt[positive[0]]["inputs"]["width"] = draw.choice((1, 32, 4096))
    elif sizes < 0.2:
        graph.prompt[latent[0]]["inputs"]["channels"] = draw.choice((1, 4, 128))
    elif sizes < 0.3:
        graph.prompt[latent[0]]["inputs"] |= {"width": draw.choice((1, 2, 3)), "height": 1}
    if is_plain:
        loader = graph.parallel_loader(files.flux, "cpu:2")
        return graph, graph.parallel_sampler(loader, positive, negative, latent, steps=2)
    return graph, graph.ksampler(graph.model("ours", files.flux), positive, negative, latent, steps=2)


def _pipeline(files: Files, draw: random.Random) -> tuple[Graph, list]:
    kind = draw.choice(PIPELINES)
    graph = AnyGraph(files.comfy, kind, files.families[kind])
    model = graph.parallel(
        graph.stock(),
        pipefusion=2,
        warmup_steps=draw.choice((0, 1, 2)),
        num_pipeline_patch=draw.choice((0, 1, 3)),
    )
    settings = {"steps": 3, "cfg": draw.choice((1.0, 3.0)), "sampler_name": draw.choice(("euler", "heun"))}
    return graph, graph.ksampler([model, 0], *graph.request(), **settings)


def _gguf(files: Files, draw: random.Random) -> tuple[Graph, list]:
    graph = Graph()
    strategy = graph.strategy("cpu:2", ulysses=2, shard_weights=draw.random() < 0.5)
    loader = graph.add(
        "ParallelModelLoader", model_name=files.gguf, weight_dtype="default", strategy=strategy
    )
    request = graph.text(1), graph.text(2), graph.latent(width=8, height=6)
    return graph, graph.ksampler([loader, 0], *request, steps=2)


def _batch(files: Files, draw: random.Random) -> tuple[Graph, list]:
    graph = AnyGraph(files.comfy, "flux", files.families["flux"])
    model = graph.parallel(graph.stock(), data=2)
    return graph, graph.ksampler([model, 0], *graph.request(draw.randint(1, 3)), steps=2)


def _packs(files: Files, draw: random.Random) -> tuple[Graph, list]:
    graph = AnyGraph(files.comfy, "flux", files.families["flux"])
    model, is_before = graph.stock(), draw.random() < 0.5
    if not is_before:
        model = [graph.parallel(model, ulysses=2), 0]
    for name in draw.sample(list(PACKS), draw.randint(1, 2)):
        model = [graph.add(name, model=model, **PACKS[name]), 0]
    if is_before:
        model = [graph.parallel(model, ulysses=2), 0]
    return graph, graph.ksampler(model, *graph.request(), steps=2)


class Fuzzed:
    """A working graph with up to two inputs replaced, and the list of these changes in words."""

    def __init__(self, draw: random.Random, files: Files) -> None:
        self.prompt, self.changes = files.draw(draw).prompt, []
        for _ in range(draw.choice((0, 1, 1, 2))):
            name = draw.choice([n for n in self.prompt if n.startswith(CHANGED)])
            inputs = self.prompt[name]["inputs"]
            field = draw.choice([name for name in inputs if name not in FAULTS])
            value = draw.choice(
                (*LITERALS, draw.choice([[other, draw.randint(0, 2)] for other in self.prompt]))
            )
            inputs[field] = value
            self.changes.append(f"{name}.{field} = {value!r}"[:80])

    @property
    def words(self) -> str:
        return "; ".join(self.changes) or "sizes"


def fuzz_prompts(comfy: Comfy, count: int, findings: Findings) -> None:
    """Runs `count` hostile prompts in one ComfyUI, which must survive them and still give the right latent."""
    draw = random.Random(3)
    files = Files(comfy)
    expected = _good_latent(comfy, files.flux)
    descriptors = _descriptors(comfy.server.pid)
    for number in range(count):
        findings.prompts += 1
        _run(comfy, Fuzzed(draw, files), findings)
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            try:
                found = _good_latent(comfy, files.flux)
                if not torch.equal(found, expected):
                    off = (found - expected).abs().max() / expected.abs().max()
                    findings.add("wrong", f"a good prompt after {number + 1} bad ones is off by {off:.1e}")
            except (PromptError, TimeoutError) as error:
                findings.add("wrong", f"a good prompt after {number + 1} bad ones: {error}")
    # A new group for each set of devices may add descriptors; a prompt may not.
    grown = _descriptors(comfy.server.pid) - descriptors
    if grown > 40:
        findings.add("leaks", f"{grown} descriptors after {count} prompts")


def _run(comfy: Comfy, fuzzed: Fuzzed, findings: Findings) -> None:
    try:
        comfy.run(fuzzed.prompt, timeout=DEADLINE)
        latent = comfy.tensor("fuzzed.safetensors")
        if not torch.isfinite(latent).all():
            findings.add("wrong", f"{fuzzed.words}: the latent is not finite")
    except PromptRejected as error:
        text = str(error)
        if any(bare in text for bare in BARE) and any(name in text for name in OURS):
            findings.add("bare_errors", f"{fuzzed.words}: {text}")
    except PromptFailed as error:
        kind = error.exception_type.rpartition(".")[2]
        if error.node_type.startswith(OURS) and kind in BARE:
            findings.add(
                "bare_errors", f"{fuzzed.words}: {error.node_type}: {kind}: {error.exception_message}"
            )
    except TimeoutError:
        findings.add("hangs", fuzzed.words)
    except PromptError as error:
        findings.add("bare_errors", f"{fuzzed.words}: {error}")


def _good_latent(comfy: Comfy, unet: str) -> torch.Tensor:
    """Returns the latent of a working prompt. Its strategy is fixed: `auto` could pick one that rounds differently."""
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    result = graph.parallel_sampler(
        loader, graph.text(1), graph.text(2), graph.latent(width=8, height=6), steps=2
    )
    latent = comfy.sample(graph.prompt, result)
    if not math.isfinite(latent.abs().max().item()):
        raise AssertionError("the good prompt gives no latent")
    return latent


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
