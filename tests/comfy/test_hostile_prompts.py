"""Pickles in any input of a prompt or in a model folder are refused, and none of their code runs. An input for a link
takes nothing else: the node's error names the input, what came, and what the input takes."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator

import pytest

from comfyui_client import PromptFailed, PromptRejected
from graphs import STOCK, Graph, inputs_of
from hostile_bytes import Touches

OURS = ("StrategySelector", "ParallelFluxLoader", "ParallelModelLoader", "ParallelModel", "ParallelSampler")


def _prompts(unet: str) -> dict[str, dict]:
    """Returns {loader: a prompt that samples with it}."""
    found = {}
    for kind in ("ParallelFluxLoader", "ParallelModelLoader", "ParallelModel"):
        graph = Graph()
        model = graph.loaded_by(kind, unet, graph.strategy("cpu:2", ulysses=2))
        latent = graph.parallel_sampler(model, *graph.request(), steps=1)
        graph.save(latent, "hostile.safetensors")
        found[kind] = graph.prompt
    return found


def _ends(comfy, prompt: dict) -> str:
    """Runs a prompt and returns "rejected", "failed" or "done"."""
    try:
        comfy.run(prompt)
    except PromptRejected:
        return "rejected"
    except PromptFailed:
        return "failed"
    return "done"


def test_no_input_of_a_prompt_is_ever_unpickled(comfy, tmp_path):
    mark = tmp_path / "was unpickled"
    data = pickle.dumps(Touches(mark))
    assert pickle.loads(data) is None and mark.exists()  # noqa: S301, the control
    mark.unlink()
    hostile = (
        base64.b64encode(data).decode(),
        {"py/reduce": [{"py/type": "pathlib.Path"}, str(mark)], "__class__": "Path"},
        [data.decode("latin-1")],
    )
    taken = {"rejected": 0, "failed": 0, "done": 0}
    for prompt in _prompts(comfy.write_flux("hostile.safetensors")).values():
        assert _ends(comfy, prompt) == "done"
        text = json.dumps(prompt)
        for name in (name for name, node in prompt.items() if node["class_type"] in OURS):
            for given in prompt[name]["inputs"]:
                for value in hostile:
                    changed = json.loads(text)
                    changed[name]["inputs"][given] = value
                    taken[_ends(comfy, changed)] += 1
                    assert not mark.exists(), (name, given)
    assert taken["rejected"] > 100
    assert taken["done"] == 0


@pytest.mark.parametrize("loader", ["ParallelFluxLoader", "ParallelModelLoader", "ParallelModel"])
def test_a_pickle_in_a_model_folder_is_refused_by_each_loader(comfy, tmp_path, loader):
    mark, path = tmp_path / "was unpickled", "pickle.safetensors"
    comfy.write_flux(path)  # makes a file of that name in the model folder
    (found,) = comfy.server.base_directory.rglob(path)
    found.write_bytes(pickle.dumps(Touches(mark)))
    try:
        assert _ends(comfy, _prompts(path)[loader]) in ("rejected", "failed")
    finally:
        found.unlink()
    assert not mark.exists()


LORA = "unread.safetensors"
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
def ours(comfy) -> dict[str, dict]:
    """Our nodes. Their lists have an empty LoRA: a refused prompt never reads it."""
    (comfy.models("loras") / LORA).touch()
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


def prompt_with(node: str, info: dict, unet: str, name: str, value: object) -> dict:
    """Returns a prompt around the node that is valid except for `value` in its input `name`."""
    graph, inputs = Wired(), {}
    for field, kind, options, _ in inputs_of(info):
        if field == name:
            inputs[field] = value
        elif kind not in WIDGETS:
            inputs[field] = graph.source(kind, unet)
        elif kind == "COMBO":
            files = {"unet_name": unet, "model_name": unet, "lora_name": LORA}
            inputs[field] = files.get(field) or options.get("default", options["options"][0])
        else:
            inputs[field] = options.get("default", 0)
    graph.add("PreviewAny", source=[graph.add(node, **inputs), 0])
    return graph.prompt


def test_every_link_input_of_every_node_refuses_literals_before_anything_runs(comfy, ours, unet):
    number = 0
    for node, name, value in tried(ours, LITERALS):
        with pytest.raises(PromptRejected) as rejected:
            comfy.client.queue(prompt_with(node, ours[node], unet, name, value))
        (report,) = rejected.value.node_errors.values()
        assert report["class_type"] == node
        words = {error["details"] for error in report["errors"]}
        assert any(f"The input {name} takes " in text for text in words), (node, name, value, words)
        assert all(len(text) < 400 for text in words)
        assert {error["type"] for error in report["errors"]} == {"custom_validation_failed"}
        number += 1
    assert number >= 7 * len(LITERALS)


def test_every_link_input_of_every_node_refuses_odd_values_of_other_nodes_by_name(comfy, ours, unet):
    for node, name, value in tried(ours, VALUES):
        prompt = prompt_with(node, ours[node], unet, name, ["odd", 0])
        prompt["odd"] = {"class_type": "TestAnything", "inputs": {"value": json.dumps(value)}}
        with pytest.raises(PromptFailed) as failed:
            comfy.run(prompt)
        assert failed.value.node_type == node
        assert failed.value.exception_type.endswith("RequestError")
        assert failed.value.exception_message.startswith(f"The input {name} takes ")


def test_nothing_where_a_link_is_needed_is_refused_by_name_and_without_a_strategy_all_is_well(
    comfy, ours, unet
):
    info, words = ours["ParallelSampler"], r"The input positive takes a CONDITIONING.*; nothing came instead"
    with pytest.raises(PromptFailed, match=words):
        comfy.run(prompt_with("ParallelSampler", info, unet, "positive", None))
    comfy.run(prompt_with("ParallelFluxLoader", ours["ParallelFluxLoader"], unet, "strategy", None))
