"""A strategy that does not fit the devices or the model is refused before the prompt is queued, with an error at the
input that causes it, whichever node takes the strategy."""

from __future__ import annotations

import pytest

from comfyui_client import PromptFailed, PromptRejected
from graphs import Graph

FLUX = "ParallelFluxLoader"
UNET = "tiny_two_blocks.safetensors"  # two attention heads
pytestmark = pytest.mark.usefixtures("unet")  # which writes it
TOO_MANY = f"ulysses_degree: ulysses_degree 3 is more than the 2 attention heads of {UNET}"
STAGES = f"pipefusion_degree: pipefusion_degree 5: {UNET} has 4 blocks"
HEADS = (
    f"tensor_degree: tensor_degree 3 times ulysses_degree 1 does not divide the 2 attention heads of {UNET}"
)


def _prompt(kind: str, devices: str, *, at_sampler: bool = False, **choice) -> Graph:
    graph = Graph()
    strategy = graph.strategy(devices, **choice)
    loader = graph.loaded_by(kind, UNET, None if at_sampler else strategy)
    own = {"strategy": strategy} if at_sampler else {}
    latent = graph.parallel_sampler(loader, *graph.request(), steps=1, **own)
    graph.save(latent, "rules.safetensors")
    return graph


@pytest.mark.parametrize(
    ("kind", "devices", "choice", "line"),
    [
        (FLUX, "cpu:3", {"ulysses": 3}, TOO_MANY),
        ("ParallelModel", "cpu:3", {"ulysses": 3}, TOO_MANY),
        ("ParallelModelLoader", "cpu:5", {"pipefusion": 5}, STAGES),
        ("ParallelModel", "cpu:3", {"tensor": 3}, HEADS),
        (FLUX, "cpu:3", {"ulysses": 3, "at_sampler": True}, TOO_MANY),
        (FLUX, "cpu:2", {"ring": 3}, "ring_degree, devices: Ring 3 needs 3 devices; 2 are selected"),
        (FLUX, "gpu7", {}, "devices: devices 'gpu7' is not understood"),
        (FLUX, "cpu:2", {"ring": 65}, "ring_degree: ring_degree is 65; it must be from 1 to 64"),
    ],
)
def test_what_cannot_run_is_never_queued(comfy, kind, devices, choice, line):
    """tests/observability/preview/test_form.py has more inputs that cannot run."""
    before = comfy.ranks()
    with pytest.raises(PromptRejected) as rejected:
        comfy.client.queue(_prompt(kind, devices, **choice).prompt)
    assert comfy.ranks() == before
    ((node, report),) = rejected.value.node_errors.items()
    assert node == "StrategySelector0" and report["class_type"] == "StrategySelector"
    by_input = {error["extra_info"]["input_name"]: error for error in report["errors"]}
    for marked in line.split(": ")[0].split(", "):
        error = by_input[marked]
        assert error["type"] == "custom_validation_failed"
        assert error["details"].startswith(f"{marked} - {line}")
        assert UNET not in line or "nearest valid" in error["details"]


def test_of_a_model_that_only_a_run_tells_what_holds_for_all_is_checked(comfy):
    graph = Graph()
    unknown = graph.add("TestAnything", value="1")
    loader = graph.add("ParallelModel", model=[unknown, 0], strategy=graph.strategy("cpu:4", cfg=4))
    latent = graph.parallel_sampler([loader, 1], *graph.request(), steps=1)
    with pytest.raises(PromptRejected, match="there are only two prompts to share out"):
        comfy.sample(graph.prompt, latent)


def test_a_selector_is_held_to_its_own_models_and_each_says_why_in_their_numbers(comfy):
    """The prompt has two selectors. Both strategies fit their models, so it is queued and runs."""
    graph = _prompt(FLUX, "cpu:2", ulysses=2)
    four = comfy.write_flux("tiny_rules_4.safetensors", heads=4)
    other = graph.parallel_loader(four, "cpu:4", ulysses=4)
    # No output node needs this loader, so its two heads do not count.
    graph.loaded_by(FLUX, UNET, graph.prompt[other]["inputs"]["strategy"])
    told = graph.add("TestSaveText", text=["StrategySelector0", 1], path="why.txt")
    graph.add("PreviewAny", source=[other, 0])
    comfy.run(graph.prompt)
    assert f"Predicted for {UNET}" in comfy.output("why.txt").read_text()
    graph.prompt["StrategySelector0"]["inputs"] |= {"mode": "auto", "devices": "cpu:3"}
    graph.prompt[told]["inputs"]["path"] = "auto.txt"
    comfy.run(graph.prompt)
    why = comfy.output("auto.txt").read_text()
    assert f"Plan for {UNET}" in why and "the 2 attention heads" in why and "the 24" not in why


def test_what_a_node_has_to_run_for_is_checked_when_it_has_and_what_it_only_holds_before(comfy):
    prompt = _prompt(FLUX, "cpu:2", ring=2).prompt
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


def test_degrees_that_auto_decides_are_not_held_against_a_person(comfy):
    prompt = _prompt(FLUX, "cpu:1", ring=3).prompt
    prompt["StrategySelector0"]["inputs"]["mode"] = "auto"
    comfy.run(prompt)


@pytest.mark.parametrize("missing", ["mode", "cfg_degree"])
def test_an_input_that_an_old_workflow_lacks_is_named_in_comfyuis_words(comfy, missing):
    prompt = _prompt(FLUX, "cpu:2", ring=2).prompt
    del prompt["StrategySelector0"]["inputs"][missing]
    with pytest.raises(PromptRejected) as rejected:
        comfy.client.queue(prompt)
    (error,) = rejected.value.node_errors["StrategySelector0"]["errors"]
    assert (error["type"], error["details"]) == ("required_input_missing", missing)
