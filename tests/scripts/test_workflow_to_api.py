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


def convert(*nodes, links):
    return workflow_to_api({"nodes": list(nodes), "links": links}, OBJECT_INFO)


def test_values_get_the_names_of_their_inputs_and_the_seed_control_is_dropped():
    prompt = convert(loader(), sampler(), links=[[1, 1, 0, 2, 0, "MODEL"]])
    assert prompt["1"]["inputs"] == {"name": "b.safetensors"}
    assert prompt["2"] == {
        "class_type": "Sampler",
        "inputs": {"model": ["1", 0], "seed": 7, "steps": 4, "sampler_name": "heun", "denoise": 0.5},
        "_meta": {"title": "The sampler"},
    }


def test_a_workflow_without_the_control_value_reads_the_same():
    prompt = convert(loader(), sampler(values=(7, 4, "heun", 0.5)), links=[[1, 1, 0, 2, 0, "MODEL"]])
    assert prompt["2"]["inputs"]["steps"] == 4


def test_an_input_newer_than_the_workflow_gets_its_default():
    prompt = convert(loader(), sampler(values=(7, "fixed", 4, "heun")), links=[[1, 1, 0, 2, 0, "MODEL"]])
    assert prompt["2"]["inputs"]["denoise"] == 1.0


def test_a_missing_value_without_default_is_an_error():
    with pytest.raises(WorkflowError, match="sampler_name"):
        convert(loader(), sampler(values=(7, "fixed", 4)), links=[[1, 1, 0, 2, 0, "MODEL"]])


def test_values_that_fit_no_input_are_an_error():
    with pytest.raises(WorkflowError, match="'more'"):
        convert(
            loader(), sampler(values=(7, "fixed", 4, "heun", 1.0, "more")), links=[[1, 1, 0, 2, 0, "MODEL"]]
        )


def test_a_node_that_is_not_installed_is_named():
    with pytest.raises(WorkflowError, match="node 9: Absent is not installed"):
        convert({"id": 9, "type": "Absent"}, links=[])


def test_reroutes_bypassed_and_muted_nodes_are_resolved():
    through = {
        "id": 3,
        "type": "Patch",
        "mode": 4,
        "inputs": [{"name": "model", "type": "MODEL", "link": 1}],
        "outputs": [{"type": "MODEL"}],
        "widgets_values": [1.0],
    }
    reroute = {
        "id": 4,
        "type": "Reroute",
        "inputs": [{"name": "", "type": "*", "link": 2}],
        "outputs": [{"type": "MODEL"}],
    }
    links = [[1, 1, 0, 3, 0, "MODEL"], [2, 3, 0, 4, 0, "MODEL"], [3, 4, 0, 2, 0, "MODEL"]]
    prompt = convert(loader(), through, reroute, sampler(link=3), links=links)
    assert set(prompt) == {"1", "2"}
    assert prompt["2"]["inputs"]["model"] == ["1", 0]
    muted = convert(loader(mode=2), sampler(), links=[[1, 1, 0, 2, 0, "MODEL"]])
    assert "model" not in muted["2"]["inputs"]


def test_notes_are_left_out_and_primitives_become_values():
    note = {"id": 5, "type": "MarkdownNote", "widgets_values": ["read me"]}
    primitive = {"id": 6, "type": "PrimitiveNode", "widgets_values": [99, "fixed"]}
    node = sampler()
    node["inputs"].append({"name": "seed", "type": "INT", "link": 2, "widget": {"name": "seed"}})
    links = [[1, 1, 0, 2, 0, "MODEL"], {"id": 2, "origin_id": 6, "origin_slot": 0}]
    prompt = convert(loader(), node, note, primitive, links=links)
    assert set(prompt) == {"1", "2"}
    assert prompt["2"]["inputs"]["seed"] == 99


def test_subgraphs_are_refused():
    with pytest.raises(WorkflowError, match="subgraphs"):
        workflow_to_api({"nodes": [], "definitions": {"subgraphs": [{}]}}, OBJECT_INFO)
