"""The HTTP check of Strategy Selector is bounded, serves only ComfyUI's own page and survives any body."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from parallel_backend.observability.preview.form import LIMITS, SelectorInputs

ROUTE = "/parallel_sampling/check_strategy"
UNET = "tiny_check.safetensors"  # two attention heads


def _check(comfy, inputs: dict, **loader: str) -> dict:
    status, said = comfy.ask(ROUTE, {"inputs": inputs, "loader": loader})
    assert status == 200
    return said


def test_the_check_takes_what_the_node_has(comfy):
    schema = comfy.client.object_info()["StrategySelector"]["input"]
    inputs = {**schema["required"], **schema["optional"]}
    assert {name: options["default"] for name, (_, options) in inputs.items()} == asdict(SelectorInputs())
    assert {n: (o["min"], o["max"]) for n, (_, o) in inputs.items() if "min" in o} == LIMITS


def test_the_rules_are_those_of_the_loaders_model(comfy):
    comfy.write_flux(UNET, double_blocks=2, single_blocks=2)
    inputs = {"mode": "manual", "devices": "cpu:3", "ulysses_degree": 3}
    assert _check(comfy, inputs)["problems"] == []  # Flux.1 has 24 heads
    (problem,) = _check(comfy, inputs, node="ParallelFluxLoader", unet_name=UNET)["problems"]
    assert problem["inputs"] == ["ulysses_degree"] and f"2 attention heads of {UNET}" in problem["message"]
    (problem,) = _check(
        comfy, {**inputs, "devices": "cpu:16", "ulysses_degree": 16}, node="ParallelDemoLoader"
    )["problems"]
    assert "attention heads of transformer.safetensors" in problem["message"]


def test_the_rules_of_any_model_are_not_those_of_flux(comfy):
    comfy.write_flux(UNET, double_blocks=2, single_blocks=2)
    inputs = {"mode": "manual", "devices": "cpu:3"}
    behind = {"node": "ParallelModel", "source": "UNETLoader", "unet_name": UNET}
    for loader in ({"node": "ParallelModel"}, behind, {"node": "ParallelModelLoader", "unet_name": UNET}):
        of_heads = _check(comfy, {**inputs, "ulysses_degree": 3}, **loader)["problems"]
        assert [UNET in problem["message"] for problem in of_heads] == [True] * ("unet_name" in loader)
        assert (
            _check(comfy, {**inputs, "devices": "cpu:2", "pipefusion_degree": 2}, **loader)["problems"] == []
        )
        assert _check(comfy, {**inputs, "devices": "cpu:2", "tensor_degree": 2}, **loader)["problems"] == []


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "no such file.safetensors", ""])
def test_a_name_that_no_loader_offers_reads_no_file(comfy, name):
    said = _check(comfy, {"devices": "cpu:2"}, node="ParallelFluxLoader", unet_name=name)
    assert said["basis"].startswith("Plan for Flux.1.") and said["notes"] == []


def test_whatever_is_sent_is_answered_in_words_and_starts_nothing(comfy):
    groups = comfy.groups()
    for body in (
        b"",
        b"\xff\x00",
        b"[" * 10_000,
        b"null",
        b'{"inputs": {"ring_degree": 1e999}}',
        b'{"inputs": {"devices": ["all"]}}',
        b'{"inputs": {"unknown": 1}}',
        b'{"loader": 7}',
        b" " * 1_000_000,
    ):
        status, said = comfy.ask(ROUTE, body)
        assert status == 400 and len(said["error"]) < 500, body[:50]
    for inputs in (
        {"ring_degree": 100000000000},
        {"devices": "\ud800"},
        {"devices": "cpu:" + "9" * 900},
        {"device_shares": "1e308,1e309", "devices": "cpu:2"},
        {"mode": "manual", "devices": "cpu:16", **dict.fromkeys(("cfg_degree", "tensor_degree"), 64)},
    ):
        assert _check(comfy, inputs)["problems"]
    assert comfy.groups() == groups


def test_other_pages_and_other_methods_get_nothing(comfy):
    assert comfy.ask(ROUTE, b"{}", Origin="https://elsewhere.example")[0] == 403
    assert comfy.ask(ROUTE, b"{}", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    rebound = {
        "Host": "elsewhere.example",
        "Origin": "http://elsewhere.example",
    }  # a name that resolves to 127.0.0.1
    assert comfy.ask(ROUTE, b"{}", **rebound)[0] == 403
    assert comfy.ask(ROUTE, b"{}", Host="localhost", Origin="http://localhost")[0] == 200
    assert comfy.ask(ROUTE, b"{}", "PUT")[0] in (404, 405)
