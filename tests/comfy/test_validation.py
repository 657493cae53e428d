"""A strategy that no model could run is refused before it is queued, with an error at the input that causes it."""

from __future__ import annotations

import pytest

from comfyui_client import PromptFailed, PromptRejected
from graphs import Graph


def _prompt(unet: str, devices, **choice) -> dict:
    graph = Graph()
    loader = graph.parallel_loader(unet, devices, **choice)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), steps=1)
    graph.save(latent, "validation.safetensors")
    return graph.prompt


@pytest.mark.parametrize(
    ("devices", "choice", "line"),
    [
        ("cpu:2", {"ring": 3}, "ring_degree, devices: Ring 3 needs 3 devices; 2 are selected"),
        ("gpu7", {}, "devices: devices 'gpu7' is not understood"),
        ("cpu:99", {}, "devices: devices 'cpu:99': the CPU takes 1 to 16 processes"),
        ("cpu:4", {"cfg": 3}, "cfg_degree: cfg_degree 3: there are only two prompts"),
        (
            "cpu:2",
            {"ring": 2, "device_shares": "1,2,3"},
            "device_shares: device_shares '1,2,3': write one number",
        ),
        ("cpu:2", {"ring": 65}, "ring_degree: ring_degree is 65; it must be from 1 to 64"),
        ("cpu:2", {"ring": 0}, "ring_degree: ring_degree is 0; it must be from 1 to 64"),
    ],
)
def test_what_the_devices_cannot_run_is_never_queued(comfy, unet, devices, choice, line):
    before = comfy.ranks()
    with pytest.raises(PromptRejected) as rejected:
        comfy.client.queue(_prompt(unet, devices, **choice))
    assert comfy.ranks() == before
    ((name, report),) = rejected.value.node_errors.items()
    assert name == "StrategySelector0" and report["class_type"] == "StrategySelector"
    by_input = {error["extra_info"]["input_name"]: error for error in report["errors"]}
    for marked in line.split(": ")[0].split(", "):
        error = by_input[marked]
        assert error["type"] == "custom_validation_failed"
        assert error["details"].startswith(f"{marked} - {line}")


def test_what_a_node_has_to_run_for_is_checked_when_it_has_and_what_it_only_holds_before(comfy, unet):
    prompt = _prompt(unet, "cpu:2", ring=2)
    prompt["three"] = {"class_type": "TestAnything", "inputs": {"value": "3"}}
    prompt["StrategySelector0"]["inputs"]["ring_degree"] = ["three", 0]
    with pytest.raises(PromptFailed, match="Ring 3 needs 3 devices") as failed:
        comfy.run(prompt)
    assert failed.value.exception_type == "parallel_backend.errors.StrategyError"
    prompt["StrategySelector0"]["inputs"]["cfg_degree"] = 3
    with pytest.raises(PromptRejected, match="only two prompts"):
        comfy.client.queue(prompt)
    prompt["StrategySelector0"]["inputs"]["cfg_degree"] = 1
    prompt["three"] = {"class_type": "PrimitiveInt", "inputs": {"value": 3}}
    with pytest.raises(PromptRejected, match="Ring 3 needs 3 devices"):
        comfy.client.queue(prompt)
    prompt["three"]["inputs"]["value"] = 2
    comfy.run(prompt)


def test_degrees_that_auto_decides_are_not_held_against_a_person(comfy, unet):
    prompt = _prompt(unet, "cpu:1", ring=3)
    prompt["StrategySelector0"]["inputs"]["mode"] = "auto"
    comfy.run(prompt)


@pytest.mark.parametrize("missing", ["mode", "devices", "cfg_degree", "engine"])
def test_an_input_that_an_old_workflow_lacks_is_named_in_comfyuis_words(comfy, unet, missing):
    prompt = _prompt(unet, "cpu:2", ring=2)
    del prompt["StrategySelector0"]["inputs"][missing]
    with pytest.raises(PromptRejected) as rejected:
        comfy.client.queue(prompt)
    (error,) = rejected.value.node_errors["StrategySelector0"]["errors"]
    assert (error["type"], error["details"]) == ("required_input_missing", missing)
