"""A strategy that does not fit the model is refused before the prompt is queued, whichever node takes the strategy."""

from __future__ import annotations

import pytest

from comfyui_client import PromptRejected
from graphs import Graph

UNET = "tiny_rules.safetensors"  # two attention heads
TOO_MANY = f"ulysses_degree: ulysses_degree 3 is more than the 2 attention heads of {UNET}"
STAGES = f"pipefusion_degree: pipefusion_degree 5: {UNET} has 4 blocks"
HEADS = (
    f"tensor_degree: tensor_degree 3 times ulysses_degree 1 does not divide the 2 attention heads of {UNET}"
)


@pytest.fixture(scope="module", autouse=True)
def model(comfy):
    comfy.write_flux(UNET, double_blocks=2, single_blocks=2)


def _prompt(kind: str, devices: str, *, at_sampler: bool = False, **choice) -> Graph:
    graph = Graph()
    strategy = graph.strategy(devices, **choice)
    loader = graph.loaded_by(kind, UNET, None if at_sampler else strategy)
    own = {"strategy": strategy} if at_sampler else {}
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), steps=1, **own)
    graph.save(latent, "rules.safetensors")
    return graph


@pytest.mark.parametrize(
    ("kind", "devices", "choice", "line"),
    [
        ("ParallelFluxLoader", "cpu:3", {"ulysses": 3}, TOO_MANY),
        ("ParallelModel", "cpu:3", {"ulysses": 3}, TOO_MANY),
        ("ParallelModelLoader", "cpu:5", {"pipefusion": 5}, STAGES),
        ("ParallelModel", "cpu:3", {"tensor": 3}, HEADS),
        ("ParallelFluxLoader", "cpu:3", {"ulysses": 3, "at_sampler": True}, TOO_MANY),
    ],
)
def test_what_the_model_cannot_be_split_by_is_never_queued(comfy, kind, devices, choice, line):
    with pytest.raises(PromptRejected) as rejected:
        comfy.client.queue(_prompt(kind, devices, **choice).prompt)
    ((node, report),) = rejected.value.node_errors.items()
    assert node == "StrategySelector0" and report["class_type"] == "StrategySelector"
    marked = line.split(":")[0]
    details = {error["extra_info"]["input_name"]: error["details"] for error in report["errors"]}
    assert details[marked].startswith(f"{marked} - {line}") and "nearest valid" in details[marked]


def test_of_a_model_that_only_a_run_tells_what_holds_for_all_is_checked(comfy):
    graph = Graph()
    unknown = graph.add("TestAnything", value="1")
    loader = graph.add("ParallelModel", model=[unknown, 0], strategy=graph.strategy("cpu:4", cfg=4))
    latent = graph.parallel_sampler([loader, 1], graph.text(1), graph.text(2), graph.latent(), steps=1)
    graph.save(latent, "rules.safetensors")
    with pytest.raises(PromptRejected, match="there are only two prompts to share out"):
        comfy.client.queue(graph.prompt)


def test_a_selector_is_held_to_its_own_models_and_each_says_why_in_their_numbers(comfy):
    """The prompt has two selectors. Both strategies fit their models, so it is queued and runs."""
    graph = _prompt("ParallelFluxLoader", "cpu:2", ulysses=2)
    four = comfy.write_flux("tiny_rules_4.safetensors", heads=4)
    other = graph.parallel_loader(four, "cpu:4", ulysses=4)
    # No output node needs this loader, so its two heads do not count.
    graph.add(
        "ParallelFluxLoader",
        unet_name=UNET,
        weight_dtype="auto",
        strategy=graph.prompt[other]["inputs"]["strategy"],
    )
    told = graph.add("TestSaveText", text=["StrategySelector0", 1], path="why.txt")
    graph.add("PreviewAny", source=[other, 0])
    comfy.run(graph.prompt)
    assert f"Predicted for {UNET}" in comfy.output("why.txt").read_text()
    graph.prompt["StrategySelector0"]["inputs"] |= {"mode": "auto", "devices": "cpu:3"}
    graph.prompt[told]["inputs"]["path"] = "auto.txt"
    comfy.run(graph.prompt)
    why = comfy.output("auto.txt").read_text()
    assert f"Plan for {UNET}" in why and "the 2 attention heads" in why and "the 24" not in why
