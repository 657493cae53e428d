"""Every example workflow loads into the real ComfyUI without a missing node and validates."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from comfy_harness import ROOT, Comfy
from comfyui_client import PromptRejected
from draw_workflows import SIDE, outline
from workflow_to_api import widgets, workflow_to_api

# Examples of other models: each puts Parallel Model behind stock loaders.
ANY_MODEL = (
    "Flux.2 dev on all GPUs",
    "HunyuanVideo 1.5 text to video on all GPUs",
    "LTX-2 text to video on all GPUs",
    "MiniMax-H3 text to video on all GPUs",
    "Qwen-Image-Edit on all GPUs",
    "SDXL on all GPUs",
    "Wan 2.2 text to video on all GPUs",
)
EXAMPLES = (
    *ANY_MODEL,
    "Try it without a download",
    "Flux.1 dev with a negative prompt",
    "Flux.1 dev with a ControlNet",
    "Flux.1 dev at high resolution",
    "Flux.1 dev from a picture",
    "Flux.1 dev inpainting",
    "Flux.1 dev with LoRAs",
    "Flux.1 dev on all GPUs",
    "Flux.1 dev larger than a card",
    "Flux.1 schnell on all GPUs",
    "Stock KSampler on all GPUs",
)

# Inputs that name model files. A test machine lacks these files: the only reason to reject a valid example here.
_FILE_INPUTS = {
    *("unet_name", "ckpt_name", "vae_name", "lora_name", "control_net_name"),
    *("clip_name", "clip_name1", "clip_name2", "text_encoder"),
}


@pytest.fixture(scope="module")
def comfy_with_picture(comfy: Comfy) -> Comfy:
    """The shared ComfyUI with example.png in its input folder, as in a new installation."""
    Image.new("RGB", (64, 48), "teal").save(comfy.server.base_directory / "input" / "example.png")
    return comfy


def _workflow(name: str) -> dict:
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text("utf-8"))


def _example_names():
    return sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))


def test_no_example_is_missing_or_untested():
    assert _example_names() == sorted(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_loads_and_validates(comfy_with_picture, name):
    comfy = comfy_with_picture
    prompt = workflow_to_api(_workflow(name), comfy.registry)
    for node in prompt.values():
        if node["inputs"].get("mode") == "manual":  # needs two devices, and a test machine has one
            assert node["inputs"]["devices"] == "all"
            node["inputs"]["devices"] = "cpu:2"
    try:
        prompt_id = comfy.client.queue(prompt)
    except PromptRejected as rejected:
        for report in rejected.node_errors.values():
            for error in report["errors"]:
                assert error["type"] == "value_not_in_list", error
                assert error["extra_info"]["input_name"] in _FILE_INPUTS, error
    else:
        outputs = comfy.client.wait(prompt_id, timeout=240)["outputs"]
        assert any("images" in output for output in outputs.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_what_it_shows_and_where_its_models_are(name):
    nodes = _workflow(name)["nodes"]
    (note,) = [node for node in nodes if node["type"] == "MarkdownNote"]
    assert note["widgets_values"][0].startswith("# ")
    for node in nodes:
        for model in node["properties"].get("models", []):
            assert model["name"] in node["widgets_values"]
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(model["name"])
            assert f"{model['directory']}/{model['name']}" in note["widgets_values"][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_new_workflow_whenever_it_is_opened(name):
    """A workflow with an id would show the report of an earlier run."""
    assert "id" not in _workflow(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_sockets_of_an_example_are_those_of_its_nodes(comfy, name):
    """The server cannot check them: a prompt contains neither the socket types nor the outputs that the file stores."""
    info = comfy.registry
    workflow = _workflow(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        if node["type"] not in info:
            continue
        known = info[node["type"]]
        shown = {widget for widget, *_ in widgets(known)}
        wanted = {
            socket: kind[0]
            for group in ("required", "optional")
            for socket, kind in known["input"].get(group, {}).items()
            if socket not in shown
        }
        assert {socket["name"]: socket["type"] for socket in node["inputs"]} == wanted, node["type"]
        assert [socket["type"] for socket in node["outputs"]] == known["output"], node["type"]
    for link, source, out, target, into, kind in workflow["links"]:
        leaves, enters = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert link in leaves["links"] and enters["link"] == link
        assert kind == leaves["type"] and enters["type"] in (kind, "*")


@pytest.mark.parametrize("name", ANY_MODEL)
def test_example_of_any_model_puts_parallel_model_between_a_stock_loader_and_all_else(name):
    workflow = _workflow(name)
    kinds = {node["id"]: node["type"] for node in workflow["nodes"]}
    loaders = [node for node, kind in kinds.items() if kind in ("UNETLoader", "CheckpointLoaderSimple")]
    ours = [node for node, kind in kinds.items() if kind == "ParallelModel"]
    models = [(link[1], link[3]) for link in workflow["links"] if link[5] == "MODEL"]
    assert sorted(source for source, target in models if target in ours) == sorted(loaders)
    assert all(target in ours for source, target in models if source in loaders)
    strategies = [
        kinds[link[1]] for link in workflow["links"] if link[3] in ours and link[5] == "PARALLEL_STRATEGY"
    ]
    assert strategies == ["StrategySelector"] * len(ours)


@pytest.mark.parametrize("name", ANY_MODEL)
def test_note_of_any_model_has_links_to_its_files_and_degrees_for_two_and_four_gpus(name):
    workflow = _workflow(name)
    (note,) = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    files = [model for node in workflow["nodes"] for model in node["properties"].get("models", [])]
    assert files and all(f"({model['url']})" in note for model in files)
    for part in (
        "## Parallel Model",
        "## Strategy Selector",
        "**2 GPUs:**",
        "**4 GPUs:**",
        "**ulysses_degree** 2",
        "**shard_weights**",
    ):
        assert part in note


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_keeps_a_value_for_every_widget(comfy, name):
    """An example sets each value that it shows, so that no later default changes it."""
    info = comfy.registry
    for node in _workflow(name)["nodes"]:
        if node["type"] in info:
            wanted = sum(1 + bool(o.get("control_after_generate")) for *_, o in widgets(info[node["type"]]))
            assert len(node["widgets_values"]) - (node["type"] == "LoadImage") == wanted, node["type"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_node_of_an_example_lies_on_another(name):
    boxes = [
        (node["title"] if "title" in node else node["type"], outline(node))
        for node in _workflow(name)["nodes"]
    ]
    for place, (one, a) in enumerate(boxes):
        for other, b in boxes[place + 1 :]:
            apart = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
            assert apart, f"{one} and {other}"


# ComfyUI scales a template to three quarters of the window, with 10 units around it. It draws no text below 8 pixels
# (0.57 of 14). The window is a laptop's.
_WINDOW, _MARGIN, _AROUND, _READABLE = (1366, 768), 0.75, 20, 0.58


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_opens_with_text_that_can_be_read(name):
    boxes = [outline(node) for node in _workflow(name)["nodes"]]
    width = max(box.right for box in boxes) - min(box.left for box in boxes) + _AROUND
    height = max(box.bottom for box in boxes) - min(box.top for box in boxes) + _AROUND
    assert _MARGIN * min(_WINDOW[0] / width, _WINDOW[1] / height) >= _READABLE, (width, height)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_note_fits_its_box_and_has_no_code_spans(name):
    """Nodes 2.0 draws code in notes with a contrast of only 1.5 to 1."""
    (note,) = [node for node in _workflow(name)["nodes"] if node["type"] == "MarkdownNote"]
    text = re.sub(r"\]\([^)]*\)", "]", note["widgets_values"][0])
    assert "`" not in text
    columns = (note["size"][0] - 30) // 6.6  # a letter of 12 pixels is 6.6 pixels wide
    lines = sum(max(1, -(-len(line.replace("*", "")) // columns)) for line in text.splitlines())
    assert 18 * lines <= note["size"][1], lines


def test_each_example_has_a_small_picture_and_no_picture_is_left_over():
    pictures = {path.stem: path for path in (ROOT / "example_workflows").glob("*.jpg")}
    assert sorted(pictures) == sorted(EXAMPLES)
    for path in pictures.values():
        with Image.open(path) as picture:
            assert (picture.format, picture.size) == ("JPEG", (SIDE, SIDE))
        assert path.stat().st_size < 100_000
