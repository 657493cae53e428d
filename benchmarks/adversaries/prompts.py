"""Hostile prompts: a graph that works, with some inputs replaced by what does not belong there, in the real ComfyUI."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from comfy_harness import Comfy
from comfyui_client import PromptError, PromptFailed, PromptRejected
from graphs import Graph

from .findings import Findings

# What code raises that did not look at its input.
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
DEADLINE = 60.0  # s for a prompt of three small steps, once its ranks run
CHECK_EVERY = 20  # prompts, after which one that works must still give its latent, bit for bit

LITERALS = (
    None, "", "x" * 5000, "../../etc/passwd", "cpu:2", "\x00", "ä" * 300, -1, 0, 1, 3.5, 2**31, 2**63, 2**64 - 1, 2**70,
    -(2**63), 1e308, -0.0, True, False, [], {}, [1, 2, 3], {"a": {}}, ["TestLatent0"], ["nothing", 0],
    ["TestLatent0", 9], ["TestLatent0", -1], [["a"]], "nan", "1e999", "cuda:0", "cpu:0,cpu:0", "cpu:99", "all,all",
)  # fmt: skip


class Fuzzed:
    """One prompt: the working graph, and how it was changed."""

    def __init__(self, draw: random.Random, unet: str) -> None:
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
            loader = graph.parallel_loader(unet, "cpu:2")
            result = graph.parallel_sampler(loader, positive, negative, latent, steps=2)
        else:
            result = graph.ksampler(graph.model("ours", unet), positive, negative, latent, steps=2)
        graph.save(result, "fuzzed.safetensors")
        self.prompt, self.changes = graph.prompt, []
        for _ in range(draw.choice((0, 1, 1, 2))):
            name = draw.choice([n for n in self.prompt if n.startswith(OURS) or n.startswith("KSampler")])
            inputs = self.prompt[name]["inputs"]
            field = draw.choice(list(inputs))
            value = draw.choice(
                (*LITERALS, draw.choice([[other, draw.randint(0, 2)] for other in self.prompt]))
            )
            inputs[field] = value
            self.changes.append(f"{name}.{field} = {value!r}"[:80])

    @property
    def words(self) -> str:
        return "; ".join(self.changes) or "sizes"


def fuzz_prompts(comfy: Comfy, count: int, findings: Findings) -> None:
    """`count` prompts in one ComfyUI, which must outlive them, idle ranks and all."""
    draw = random.Random(3)
    unet = comfy.write_flux("tiny_dev.safetensors")
    expected = _good_latent(comfy, unet)
    descriptors = _descriptors(comfy.server.pid)
    for number in range(count):
        findings.prompts += 1
        _run(comfy, Fuzzed(draw, unet), findings)
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            try:
                found = _good_latent(comfy, unet)
                if not torch.equal(found, expected):
                    off = (found - expected).abs().max() / expected.abs().max()
                    findings.add("wrong", f"a good prompt after {number + 1} bad ones is off by {off:.1e}")
            except (PromptError, TimeoutError) as error:
                findings.add("wrong", f"a good prompt after {number + 1} bad ones: {error}")
    # One group for each set of devices may have come; a descriptor for each prompt may not.
    grown = _descriptors(comfy.server.pid) - descriptors
    if grown > 40:
        findings.add("leaks", f"{grown} descriptors after {count} prompts")


def _run(comfy: Comfy, fuzzed: Fuzzed, findings: Findings) -> None:
    try:
        comfy.run(fuzzed.prompt, timeout=DEADLINE)
        latent = load_file(comfy.output("fuzzed.safetensors"))["samples"]
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
    """Its strategy is chosen by hand: `auto` may have learnt of a faster one meanwhile, which rounds otherwise."""
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
