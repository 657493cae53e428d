"""Nodes find what their code has kept for later, and their callbacks get each step's latents, as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from any_graphs import AnyGraph
from any_runs import TELLING, compared, latents
from differences import relative_difference

TOLERANCE = 2e-6  # relative to the largest value of the stock latent, in fp32
PLACES = (
    "an attribute",
    "a closure",
    "a dict by call",
    "a list",
    "a tensor written in place",
    "a random generator",
    "an attribute of a function",
)


def _remembering(graph: AnyGraph, model: list, place: str, label: str) -> list:
    return [graph.add("TestMemory", model=model, place=place, label=label), 0]


def _twice(graph: AnyGraph, models: tuple[list, list], request: tuple[list, list, list]) -> list:
    """Samples with the first MODEL, and then the result with the second."""
    first = graph.ksampler(models[0], *request, steps=2)
    return graph.ksampler(models[1], *request[:2], first, steps=2, denoise=0.6)


def _is_there_in_the_second(packs, remembering: Callable[[AnyGraph, list, str], list]) -> None:
    """Checks that two samplings give stock's latent, which nodes that share nothing do not give. `remembering(graph,
    model, label)`: adds a node that keeps something; nodes of another label share nothing with it."""
    graph = AnyGraph(packs, "flux")
    source, request = graph.stock(), graph.request()
    ours = [graph.parallel(source, ulysses=2), 0]
    labelled = ((source, "stock"), (ours, "ours"), (ours, "first"), (ours, "second"))
    stock, parallel, first, second = (remembering(graph, model, label) for model, label in labelled)
    ways = {
        "stock": _twice(graph, (stock, stock), request),
        "ours": _twice(graph, (parallel, parallel), request),
        "forgetful": _twice(graph, (first, second), request),
    }
    found = latents(packs, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["forgetful"], found["stock"]) > TELLING


@pytest.mark.parametrize("place", PLACES)
def test_what_a_node_keeps_in_the_first_sampling_is_there_in_the_second(packs, place):
    _is_there_in_the_second(packs, lambda graph, model, label: _remembering(graph, model, place, label))


@pytest.mark.parametrize("block", [False, True], ids=["of the network", "of a block"])
@pytest.mark.parametrize("attribute", ["a number", "a list", "an attribute that is removed"])
def test_attributes_that_a_job_writes_on_the_network_are_there_in_the_second(packs, attribute, block):
    inputs = {"attribute": attribute, "block": block}
    _is_there_in_the_second(
        packs,
        lambda graph, model, label: [
            graph.add("TestNetworkMemory", model=model, label=label, **inputs),
            0,
        ],
    )


@pytest.mark.parametrize(
    "place",
    ["the process's random generators", "a variable", "a dict in a variable", "an object in a variable"],
)
def test_what_all_nodes_share_goes_on_where_the_first_sampling_left_it(packs, place):
    """Each way is a prompt of its own, in which the node begins anew; so does the third, after ranks have computed."""
    graph = AnyGraph(packs, "flux")
    source, (positive, negative, latent) = graph.stock(), graph.request()
    ours = [graph.parallel(source, ulysses=2), 0]
    found = []
    for label, model in enumerate((source, ours, ours)):
        model = _remembering(graph, model, place, str(label))
        seeded = [graph.add("TestSeeds", latent=latent, model=model), 0]
        twice = _twice(graph, (model, model), (positive, negative, seeded))
        found.append(packs.sample(graph.prompt, twice))
    stock, *others = found
    assert all(relative_difference(other, stock) <= TOLERANCE for other in others)


@pytest.mark.parametrize(
    ("node", "inputs", "words"),
    [
        (
            "TestMemory",
            {"place": "a lock", "label": ""},
            "what changed in state.Memory stays on the devices",
        ),
        (
            "TestLockedVariable",
            {},
            "the values that an import gives to guard (parallel_test_popular.variables)",
        ),
    ],
)
def test_what_cannot_be_sent_is_said_in_the_report(packs, node, inputs, words):
    graph = AnyGraph(packs, "flux")
    model = [graph.add(node, model=graph.stock(), **inputs), 0]
    sampled = graph.parallel_sampler([graph.parallel(model, ulysses=2), 1], *graph.request(), steps=2)
    assert words in latents(packs, graph, {"ours": sampled})["report"]


def test_a_nodes_callback_gets_each_steps_latents_of_all_images(packs):
    graph = AnyGraph(packs, "wan_t2v")
    source, request = graph.stock(), graph.request(batch=2)
    models = {
        "stock": source,
        "ulysses": [graph.parallel(source, ulysses=2), 0],
        "cfg": [graph.parallel(source, cfg=2), 0],
        "pipefusion": [graph.parallel(source, pipefusion=2), 0],
    }
    names = ("positive", "negative", "latent")
    inputs = dict(zip(names, request, strict=True))
    ways = {
        way: [graph.add("TestFollowingSampler", model=model, **inputs), 0] for way, model in models.items()
    }
    found = latents(packs, graph, ways)
    assert found["stock"].shape[0] == 2 * 3 * 2
    for way in ("ulysses", "cfg", "pipefusion"):
        assert relative_difference(found[way], found["stock"]) <= TOLERANCE, way


@pytest.mark.parametrize("node", ["TestVariables", "TestLateVariables", "TestValuesOfComfyUI"])
def test_variables_that_a_node_has_set_in_modules_are_set_on_the_devices(packs, node):
    """Each of several kinds counts; the next prompt's values replace them."""
    for value in (0.3, -0.2):
        graph = AnyGraph(packs, "flux")
        source, request = graph.stock(), graph.request()
        ours = [graph.parallel(source, ulysses=2), 0]
        changed = [graph.add(node, model=source, value=value), 0]
        models = {
            "without": source,
            "stock": changed,
            "before": [graph.parallel(changed, ulysses=2), 0],
            "behind": [graph.add(node, model=ours, value=value), 0],
        }
        compared(packs, graph, graph.sampled_by(models, request, steps=2), TOLERANCE)


def test_devices_compute_with_the_settings_of_torch_that_a_node_has_set(packs):
    found = {}
    for is_on in (True, False):
        graph = AnyGraph(packs, "flux")
        ours = [graph.parallel(graph.stock(), ulysses=2), 0]
        models = {
            way: [graph.add("TestFp16Accumulation", model=model, on=is_on), 0]
            for way, model in (("stock", graph.stock()), ("ours", ours))
        }
        found[is_on] = latents(packs, graph, graph.sampled_by(models, graph.request(), steps=2))
        assert relative_difference(found[is_on]["ours"], found[is_on]["stock"]) <= TOLERANCE
    assert relative_difference(found[True]["stock"], found[False]["stock"]) > TELLING
