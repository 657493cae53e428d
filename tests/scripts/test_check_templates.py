"""The verdict on a graph of ComfyUI's template library, from its models and the nodes between loader and sampler."""

import json
import sys

import pytest

import check_templates
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, STAY


def _node(kind, takes=False, gives=False, file=None, mode=0):
    return {
        "type": kind,
        "mode": mode,
        "inputs": [{"type": "MODEL"}] * takes,
        "outputs": [{"type": "MODEL"}] * gives,
        "widgets_values": [file, "default"] if file else [],
    }


def _loader(file, **more):
    return _node("UNETLoader", gives=True, file=file, **more)


SAMPLER = _node("KSampler", takes=True)


def _patch(kind, **more):
    return _node(kind, takes=True, gives=True, **more)


@pytest.fixture
def judged(tmp_path):
    def judge(*nodes, inside=()):
        workflow = {
            "nodes": list(nodes),
            "definitions": {"subgraphs": [{"id": "1-2", "nodes": list(inside)}]},
        }
        (tmp_path / "graph.json").write_text(json.dumps(workflow))
        return check_templates.judge(tmp_path).get("graph")

    return judge


@pytest.mark.parametrize(
    ("file", "state"),
    [
        ("wan2.2_s2v_14B_fp8_scaled.safetensors", STAY),
        ("hidream_i1_full_fp8.safetensors", BLOCK),
        ("sd_xl_base_1.0.safetensors", BANDS),
        ("folder\\qwen_image_fp8_e4m3fn.safetensors", STAY),
    ],
)
def test_a_graph_runs_as_far_as_its_model_can_be_split(judged, file, state):
    assert judged(_loader(file), _patch("ModelSamplingAuraFlow"), SAMPLER) == (state, "")


@pytest.mark.parametrize(("node", "state"), [("USOStyleReference", BLOCK), ("FluxKVCache", ATTENTION)])
def test_a_patch_of_the_model_says_how_far_its_tokens_can_be_apart(judged, node, state):
    assert judged(_loader("flux1-dev.safetensors"), _patch(node), SAMPLER) == (state, "")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((_loader("moss_image_base_int8_convrot.safetensors"), SAMPLER), "newer ComfyUI"),
        ((_loader("nobodys_model.safetensors"), SAMPLER), "nothing is known of the model nobodys_model"),
        ((_loader("flux1-dev.safetensors"), _patch("BlockSparseAttention"), SAMPLER), "newer ComfyUI"),
        ((_loader("flux1-dev.safetensors"), _patch("NewNode"), SAMPLER), "NewNode was not tried"),
    ],
)
def test_what_does_not_run_is_named_with_its_reason(judged, nodes, reason):
    state, said = judged(*nodes)
    assert state == "" and reason in said


def test_nodes_inside_of_subgraphs_count_and_bypassed_ones_do_not(judged):
    inside = (_loader("z_image_bf16.safetensors"), _patch("FluxKVCache", mode=4), SAMPLER)
    assert judged(_node("1-2", takes=True), inside=inside) == (STAY, "")


def test_graphs_that_sample_nothing_here_are_left_out(judged):
    assert judged(_loader("flux1-dev.safetensors")) is None
    assert judged(_loader("sam3.1_multiplex_fp16.safetensors"), SAMPLER) is None
    assert judged(SAMPLER) is None


def test_classes_are_the_tables_or_named_on_the_page_of_models():
    page = check_templates.ROOT.joinpath("docs", "models.md").read_text()
    named = {name for _, name in check_templates._CLASSES} - {"", "no sampling"}
    assert {name for name in named - set(TABLE) if f"| {name} |" not in page} == set()


def test_nodes_of_the_page_of_compatibility_are_read():
    exact = check_templates.exact_nodes()
    assert len(exact) > 100 and "ModelMergeAdd" in exact and "none" not in exact


def test_the_last_line_is_for_machines_and_the_page_says_the_same(tmp_path, monkeypatch, capsys):
    graphs = {"runs": _loader("flux1-dev.safetensors"), "not": _loader("moss_image.safetensors")}
    for name, loader in graphs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"nodes": [loader, SAMPLER]}))
    monkeypatch.setattr(check_templates, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--json", "--write", "a package 1.0"])
    check_templates.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["graphs"], found["run"], set(found["not"])) == (2, 1, {"not"})
    written = (tmp_path / "page.md").read_text()
    assert "a package 1.0: 2 graphs" in written
    assert "**1** run: 50% of all, and 100% of the 1 that" in written
    assert "| not | moss_image.safetensors needs a newer" in written
