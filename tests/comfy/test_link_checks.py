"""An input for a link takes nothing else: the node's error names the input, what came, and what the input takes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from comfyui_client import PromptFailed, PromptRejected
from graphs import STOCK, Graph, inputs_of

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
LITERALS = [3.5, 0, "cpu:2", "", {}, {"samples": 1}, True, {"__value__": [1, 2, 3]}, 1e300, "x" * 5000]
# Values that a node may send over a link of any type. The empty list is missing: it is an odd, but valid conditioning.
VALUES = [3.5, "cpu:2", {}, {"samples": 1}, [1, 2, 3], [[1, 2]]]


class Wired(Graph):
    """A graph with a source for each type of link that our nodes take."""

    def source(self, kind: str, unet: str) -> list:
        return {
            "PARALLEL_MODEL": lambda: self.loaded_by("ParallelFluxLoader", unet),
            "MODEL": lambda: self.model(STOCK, unet),
            "PARALLEL_STRATEGY": lambda: self.strategy("cpu:1"),
            "CONDITIONING": lambda: self.text(1),
            "LATENT": self.latent,
            "IMAGE": lambda: [self.add("TestImage", width=16, height=16, batch=1, channels=3), 0],
            # Parallel CLIP takes encoders of three types.
            "COMFY_MATCHTYPE_V3": lambda: [
                self.add("TestEncoder", kind="clip_l", clip_name="linked.safetensors", draw=0), 0
            ],
            "VAE": lambda: [self.add("TestTinyVAE"), 0],
        }[kind]()  # fmt: skip


@pytest.fixture(scope="module")
def lora(comfy):
    """The name of an empty file in the loader's list: a refused prompt never reads it."""
    folder = comfy.server.base_directory / "models" / "loras"
    folder.mkdir(exist_ok=True)
    (folder / "unread.safetensors").touch()
    return "unread.safetensors"


@pytest.fixture(scope="module")
def ours(comfy, lora) -> dict[str, dict]:
    registry = comfy.client.object_info()
    return {name: info for name, info in registry.items() if info["category"] == "parallel"}


def tried(ours: dict[str, dict], values: list) -> Iterator[tuple[str, str, object]]:
    """Yields (node, input, value): all values for the first input of each type, one for each of the others."""
    seen = set()
    for node, info in ours.items():
        for name, kind, *_ in inputs_of(info):
            if kind not in WIDGETS:
                yield from ((node, name, value) for value in values[: 1 if kind in seen else None])
                seen.add(kind)


def prompt_with(node: str, info: dict, unet: str, lora: str, name: str, value: object) -> dict:
    """Returns a prompt around the node that is valid except for `value` in its input `name`."""
    graph, inputs = Wired(), {}
    for field, kind, options, _ in inputs_of(info):
        if field == name:
            inputs[field] = value
        elif kind not in WIDGETS:
            inputs[field] = graph.source(kind, unet)
        elif kind == "COMBO":
            files = {"unet_name": unet, "model_name": unet, "lora_name": lora}
            inputs[field] = files.get(field) or options.get("default", options["options"][0])
        else:
            inputs[field] = options.get("default", 0)
    graph.add("PreviewAny", source=[graph.add(node, **inputs), 0])
    return graph.prompt


def test_every_link_input_of_every_node_refuses_literals_before_anything_runs(comfy, ours, unet, lora):
    number = 0
    for node, name, value in tried(ours, LITERALS):
        with pytest.raises(PromptRejected) as rejected:
            comfy.client.queue(prompt_with(node, ours[node], unet, lora, name, value))
        (report,) = rejected.value.node_errors.values()
        assert report["class_type"] == node
        words = {error["details"] for error in report["errors"]}
        assert any(f"The input {name} takes " in text for text in words), (node, name, value, words)
        assert all(len(text) < 400 for text in words)
        assert {error["type"] for error in report["errors"]} == {"custom_validation_failed"}
        number += 1
    assert number >= 7 * len(LITERALS)


def test_every_link_input_of_every_node_refuses_odd_values_of_other_nodes_by_name(comfy, ours, unet, lora):
    for node, name, value in tried(ours, VALUES):
        prompt = prompt_with(node, ours[node], unet, lora, name, ["odd", 0])
        prompt["odd"] = {"class_type": "TestAnything", "inputs": {"value": json.dumps(value)}}
        with pytest.raises(PromptFailed) as failed:
            comfy.run(prompt)
        assert failed.value.node_type == node
        assert failed.value.exception_type.endswith("RequestError")
        assert failed.value.exception_message.startswith(f"The input {name} takes ")


def test_nothing_where_a_link_is_needed_is_refused_by_name_and_without_a_strategy_all_is_well(
    comfy, ours, unet, lora
):
    info, words = ours["ParallelSampler"], r"The input positive takes a CONDITIONING.*; nothing came instead"
    with pytest.raises(PromptFailed, match=words):
        comfy.run(prompt_with("ParallelSampler", info, unet, lora, "positive", None))
    comfy.run(prompt_with("ParallelFluxLoader", ours["ParallelFluxLoader"], unet, lora, "strategy", None))
