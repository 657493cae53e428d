"""Every example workflow loads into the real ComfyUI without a missing node and validates. With its node list, saved
values of a choice with inputs of its own get the right names; tests/scripts/test_workflow_to_api.py tests the rest."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from comfy_harness import ROOT
from comfyui_client import PromptRejected
from draw_workflows import SIDE
from pages import template
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
EXAMPLES = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))

# Inputs that name model files. A test machine lacks these files: the only reason to reject a valid example here.
_FILE_INPUTS = {
    *("unet_name", "ckpt_name", "vae_name", "lora_name", "control_net_name"),
    *("clip_name", "clip_name1", "clip_name2", "text_encoder"),
}


def _note(workflow: dict) -> dict:
    (note,) = [node for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    return note


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_loads_and_validates(comfy, name):
    # A new installation has this picture.
    Image.new("RGB", (64, 48), "teal").save(comfy.server.base_directory / "input" / "example.png")
    prompt = workflow_to_api(template(name), comfy.registry)
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
    workflow = template(name)
    note = _note(workflow)["widgets_values"][0]
    assert note.startswith("# ")
    for node in workflow["nodes"]:
        for model in node["properties"].get("models", []):
            assert model["name"] in node["widgets_values"]
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(model["name"])
            assert f"{model['directory']}/{model['name']}" in note
    assert "id" not in workflow, "it would show the report of an earlier run"


@pytest.mark.parametrize("name", EXAMPLES)
def test_sockets_of_an_example_are_those_of_its_nodes_and_each_widget_has_a_value(comfy, name):
    """The server cannot check the sockets: a prompt has neither their types nor the outputs that the file stores. An
    example sets each value that it shows, so that no later default changes it."""
    workflow = template(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        if node["type"] not in comfy.registry:
            continue
        known = comfy.registry[node["type"]]
        shown = {widget for widget, *_ in widgets(known)}
        values = sum(1 + bool(options.get("control_after_generate")) for *_, options in widgets(known))
        assert len(node["widgets_values"]) - (node["type"] == "LoadImage") == values, node["type"]
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
    workflow = template(name)
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

    note = _note(workflow)["widgets_values"][0]
    files = [model for node in workflow["nodes"] for model in node["properties"].get("models", [])]
    assert files and all(f"({model['url']})" in note for model in files)
    titles = "## Parallel Model", "## Strategy Selector"
    for part in (*titles, "**2 GPUs:**", "**4 GPUs:**", "**ulysses_degree** 2", "**shard_weights**"):
        assert part in note


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_note_fits_its_box_and_has_no_code_spans(name):
    """Nodes 2.0 draws code in notes with a contrast of only 1.5 to 1."""
    note = _note(template(name))
    text = re.sub(r"\]\([^)]*\)", "]", note["widgets_values"][0])
    assert "`" not in text
    columns = (note["size"][0] - 30) // 6.6  # a letter of 12 pixels is 6.6 pixels wide
    lines = sum(max(1, -(-len(line.replace("*", "")) // columns)) for line in text.splitlines())
    assert 18 * lines <= note["size"][1], lines


def test_each_example_has_a_small_picture_and_no_picture_is_left_over():
    pictures = {path.stem: path for path in (ROOT / "example_workflows").glob("*.jpg")}
    assert sorted(pictures) == EXAMPLES
    for path in pictures.values():
        with Image.open(path) as picture:
            assert (picture.format, picture.size) == ("JPEG", (SIDE, SIDE))
        assert path.stat().st_size < 100_000


def saved_video(codec: str, *more) -> dict:
    values = ["video/clip", "auto", codec, *more]
    return {"nodes": [{"id": 1, "type": "SaveVideo", "inputs": [], "widgets_values": values}], "links": []}


def test_a_choice_brings_its_own_inputs_by_dotted_names(comfy):
    """Since ComfyUI 0.33 the names are one level deeper, because the container's choice contains the codec."""
    registry = comfy.registry
    codec = "codec" if "codec" in registry["SaveVideo"]["input"]["required"] else "format.codec"
    plain = workflow_to_api(saved_video("auto"), registry)["1"]["inputs"]
    assert plain == {"filename_prefix": "video/clip", "format": "auto", codec: "auto"}
    chosen = workflow_to_api(saved_video("h264", "re-encode", 20.0), registry)["1"]["inputs"]
    named = {codec: "h264", f"{codec}.encoding": "re-encode", f"{codec}.encoding.crf": 20.0}
    assert chosen.items() >= named.items()
    older = workflow_to_api(saved_video("h264"), registry)["1"]["inputs"]
    assert older[f"{codec}.encoding"] == "auto"


def test_a_socket_of_several_types_is_the_widget_that_it_names(comfy):
    node = {"id": 1, "type": "LTXVEmptyLatentAudio", "inputs": [], "widgets_values": [121, 24.0, 1]}
    prompt = workflow_to_api({"nodes": [node], "links": []}, comfy.registry)
    assert prompt["1"]["inputs"] == {"frames_number": 121, "frame_rate": 24.0, "batch_size": 1}
