"""Saved workflows become the prompts that the editor itself would send."""

from __future__ import annotations

import pytest

from workflow_to_api import WorkflowError, workflow_to_api

OBJECT_INFO = {
    "Loader": {"input": {"required": {"name": [["a.safetensors", "b.safetensors"]]}}},
    "Sampler": {
        "input": {
            "required": {
                "model": ["MODEL"],
                "seed": ["INT", {"default": 0, "control_after_generate": True}],
                "steps": ["INT", {"default": 20}],
                "sampler_name": ["COMBO", {"options": ["euler", "heun"]}],
            },
            "optional": {"text": ["STRING", {"forceInput": True}], "denoise": ["FLOAT", {"default": 1.0}]},
        },
        "display_name": "The sampler",
    },
    "Patch": {"input": {"required": {"strength": ["FLOAT", {}], "model": ["MODEL"]}}},
}


def loader(**extra):
    return {"id": 1, "type": "Loader", "inputs": [], "widgets_values": ["b.safetensors"], **extra}


def sampler(link=1, values=(7, "randomize", 4, "heun", 0.5), **extra):
    sockets = [{"name": "model", "type": "MODEL", "link": link}]
    return {"id": 2, "type": "Sampler", "inputs": sockets, "widgets_values": list(values), **extra}


WIRED = [[1, 1, 0, 2, 0, "MODEL"]]  # the loader's model goes to the sampler


def convert(*nodes, links=WIRED):
    return workflow_to_api({"nodes": list(nodes), "links": links}, OBJECT_INFO)


def test_values_get_the_names_of_their_inputs_and_the_seed_control_is_dropped():
    prompt = convert(loader(), sampler())
    assert prompt["1"]["inputs"] == {"name": "b.safetensors"}
    assert prompt["2"] == {
        "class_type": "Sampler",
        "inputs": {"model": ["1", 0], "seed": 7, "steps": 4, "sampler_name": "heun", "denoise": 0.5},
        "_meta": {"title": "The sampler"},
    }
    assert convert(loader(), sampler(values=(7, 4, "heun", 0.5))) == prompt, "without the control's value"


def test_an_input_newer_than_the_workflow_gets_its_default():
    prompt = convert(loader(), sampler(values=(7, "fixed", 4, "heun")))
    assert prompt["2"]["inputs"]["denoise"] == 1.0


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (sampler(values=(7, "fixed", 4)), "sampler_name"),
        (sampler(values=(7, "fixed", 4, "heun", 1.0, "more")), "'more'"),
        ({"id": 9, "type": "Absent"}, "node 9: Absent is not installed"),
    ],
    ids=["a value without a default is missing", "a value fits no input", "a node is not installed"],
)
def test_what_cannot_be_converted_is_named(node, words):
    with pytest.raises(WorkflowError, match=words):
        convert(loader(), node)


def test_reroutes_bypassed_and_muted_nodes_are_resolved():
    out = {"outputs": [{"type": "MODEL"}]}
    model, anything = {"name": "model", "type": "MODEL", "link": 1}, {"name": "", "type": "*", "link": 2}
    through = {"id": 3, "type": "Patch", "mode": 4, "inputs": [model], "widgets_values": [1.0], **out}
    reroute = {"id": 4, "type": "Reroute", "inputs": [anything], **out}
    links = [[1, 1, 0, 3, 0, "MODEL"], [2, 3, 0, 4, 0, "MODEL"], [3, 4, 0, 2, 0, "MODEL"]]
    prompt = convert(loader(), through, reroute, sampler(link=3), links=links)
    assert set(prompt) == {"1", "2"}
    assert prompt["2"]["inputs"]["model"] == ["1", 0]
    assert "model" not in convert(loader(mode=2), sampler())["2"]["inputs"]


def test_notes_are_left_out_and_primitives_become_values():
    note = {"id": 5, "type": "MarkdownNote", "widgets_values": ["read me"]}
    primitive = {"id": 6, "type": "PrimitiveNode", "widgets_values": [99, "fixed"]}
    node = sampler()
    node["inputs"].append({"name": "seed", "type": "INT", "link": 2, "widget": {"name": "seed"}})
    links = [*WIRED, {"id": 2, "origin_id": 6, "origin_slot": 0}]
    prompt = convert(loader(), node, note, primitive, links=links)
    assert set(prompt) == {"1", "2"}
    assert prompt["2"]["inputs"]["seed"] == 99


def test_subgraphs_are_refused():
    with pytest.raises(WorkflowError, match="subgraphs"):
        workflow_to_api({"nodes": [], "definitions": {"subgraphs": [{}]}}, OBJECT_INFO)
