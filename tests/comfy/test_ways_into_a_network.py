"""Nodes that change a network's code or weights, before or behind Parallel Model, give the stock latent.

Each of the 31 ways of `inject_ways/ways.py` is tried on Flux, Wan and a UNet with two devices.
"""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import pytest
from torch import Tensor

from any_graphs import AnyGraph
from any_runs import TELLING, latents
from comfyui_client import PromptFailed
from differences import relative_difference
from waiting import wait_until

TOLERANCE = 2e-6  # relative to the largest value of the stock latent, in fp32
SAMPLING = {
    "flux": {"steps": 2, "cfg": 1.0},
    "wan_t2v": {"steps": 2, "cfg": 3.0},
    "unet": {"steps": 1, "cfg": 1.0},  # a single row, so that devices compute bands of it
}


def _names() -> list[str]:
    """Reads the names of the ways from their source, because only ComfyUI's process can import the pack."""
    tree = ast.parse((Path(__file__).parent / "inject_ways" / "ways.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    arguments = {function.name: [one.arg for one in function.args.args] for function in functions}
    return [name for name, taken in arguments.items() if taken == ["model", "network", "place"]]


WAYS = _names()


@pytest.fixture(scope="module", autouse=True)
def undone(packs):
    """Undoes the change of the module's last test. Before that, each TestReach node undoes the change before it."""
    yield
    undo = AnyGraph(packs, "wan_t2v")
    undo.add("TestUndo", model=undo.stock(), after=undo.request()[2])
    packs.run(undo.prompt)


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Tensor]:
    """A cache of stock latents by (family, way); the way "" is the unchanged model."""
    return {}


def _jobs_done(packs) -> int:
    """Returns how many sampling jobs the ranks have finished without an error."""
    return sum((line.get("request"), line.get("result")) == ("sample", "done") for line in packs.logged())


def test_there_are_31_ways():
    assert len(WAYS) == 31


# Grouped by model, because loading one takes longer than sampling with it. Functions of ComfyUI create the classes of
# layers for quantised weights.
@pytest.mark.parametrize(("kind", "way"), [*product(SAMPLING, WAYS), ("wan_fp8", "layer_of_comfyui")])
def test_a_way_into_the_network_counts_on_both_sides_of_parallel_model(packs, known, kind, way):
    settings = SAMPLING.get(kind, SAMPLING["wan_t2v"])
    if (kind, "") not in known:
        graph = AnyGraph(packs, kind)
        sampled = graph.ksampler(graph.stock(), *graph.request(), **settings)
        known[kind, ""] = latents(packs, graph, {"plain": sampled})["plain"]
    graph = AnyGraph(packs, kind)
    request, source = graph.request(), graph.stock()
    changed = [graph.add("TestReach", model=source, way=way), 0]
    stock = graph.ksampler(changed, *request, **settings)
    before = graph.ksampler([graph.parallel(changed, ulysses=2), 0], *request, **settings)
    as_it_was = [graph.add("TestUndo", model=source, after=stock, and_after=before), 0]
    parallel = [graph.parallel(as_it_was, ulysses=2), 0]
    reached = [graph.add("TestReach", model=parallel, way=way), 0]
    behind = graph.ksampler(reached, *request, **settings)
    as_it_was = [graph.add("TestUndo", model=parallel, after=behind), 0]
    afterwards = graph.ksampler(as_it_was, *request, **settings)
    done = _jobs_done(packs)
    ways = {"stock": stock, "before": before, "behind": behind, "afterwards": afterwards}
    found = latents(packs, graph, ways)
    wait_until(lambda: _jobs_done(packs) >= done + 3, 20)  # the log is written in the background
    known[kind, way] = stock = found["stock"]
    assert stock.isfinite().all()
    assert relative_difference(stock, known[kind, ""]) > TELLING
    expected = {"before": stock, "behind": stock, "afterwards": known[kind, ""]}
    differences = {name: relative_difference(found[name], latent) for name, latent in expected.items()}
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("choice", [{"ulysses": 2}, {"ulysses": 2, "shard_weights": True}])
@pytest.mark.parametrize("kind", ["sd3", "minimax"])
def test_buffers_in_place_count_on_both_sides_of_parallel_model(packs, kind, choice):
    graph = AnyGraph(packs, kind)
    request, source = graph.request(), graph.stock()
    settings = {"steps": 2, "cfg": 1.0}
    plain = graph.ksampler(source, *request, **settings)
    changed = [graph.add("TestReach", model=source, way="buffers_in_place", after=plain), 0]
    ways = {"plain": plain, "stock": graph.ksampler(changed, *request, **settings)}
    ways["before"] = graph.ksampler([graph.parallel(changed, **choice), 0], *request, **settings)
    as_it_was = [graph.add("TestUndo", model=source, after=ways["stock"], and_after=ways["before"]), 0]
    parallel = [graph.parallel(as_it_was, **choice), 0]
    reached = [graph.add("TestReach", model=parallel, way="buffers_in_place"), 0]
    ways["behind"] = graph.ksampler(reached, *request, **settings)
    undone = [graph.add("TestUndo", model=parallel, after=ways["behind"]), 0]
    ways["afterwards"] = graph.ksampler(undone, *request, **settings)
    found = latents(packs, graph, ways)
    assert relative_difference(found["stock"], found["plain"]) > TELLING
    expected = {"before": "stock", "behind": "stock", "afterwards": "plain"}
    differences = {way: relative_difference(found[way], found[name]) for way, name in expected.items()}
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("before", [True, False])
def test_a_weight_in_place_is_refused_where_weights_are_shared_out(packs, before):
    """A device has the whole weight only while its block runs."""
    graph = AnyGraph(packs, "wan_t2v")
    request, source = graph.request(), graph.stock()
    choice, reach = {"ulysses": 2, "shard_weights": True}, {"way": "weight_in_place"}
    if before:
        changed = [graph.add("TestReach", model=source, **reach), 0]
        ours = [graph.parallel(changed, **choice), 0]
    else:
        ours = [graph.add("TestReach", model=[graph.parallel(source, **choice), 0], **reach), 0]
    sampled = graph.ksampler(ours, *request, steps=2, cfg=1.0)
    with pytest.raises(PromptFailed, match=r"changed the weight .*ffn\.2\.weight.*set shard_weights to off"):
        latents(packs, graph, {"refused": sampled})


@pytest.mark.parametrize("way", ["layer_of_torch", "layer_of_comfyui", "method_of_a_block"])
def test_a_way_into_layers_counts_where_their_weights_are_shared_out(packs, known, way):
    graph = AnyGraph(packs, "wan_t2v")
    request, settings = graph.request(), SAMPLING["wan_t2v"]
    changed = [graph.add("TestReach", model=graph.stock(), way=way), 0]
    choice = {"ulysses": 2, "shard_weights": True}
    ways = {"ours": graph.ksampler([graph.parallel(changed, **choice), 0], *request, **settings)}
    if ("wan_t2v", way) not in known:
        ways["stock"] = graph.ksampler(changed, *request, **settings)
    found = latents(packs, graph, ways)
    expected = known.setdefault(("wan_t2v", way), found.get("stock"))
    assert relative_difference(found["ours"], expected) <= TOLERANCE


@pytest.mark.parametrize("way", ["code_of_samplers", "wrapper_of_the_model", "APG"])
def test_code_in_each_step_counts_where_patches_would_flow(packs, way):
    """ComfyUI's node APG looks at the whole image for its guidance, and stores an average."""
    graph = AnyGraph(packs, "wan_t2v")
    request, settings = graph.request(), {"steps": 3, "cfg": 3.0}
    plain = graph.ksampler(graph.stock(), *request, **settings)
    node, inputs = "TestReach", {"way": way, "after": plain}
    if way == "APG":
        node, inputs = way, {"eta": 1.0, "norm_threshold": 5.0, "momentum": 0.5}
    changed = [graph.add(node, model=graph.stock(), **inputs), 0]
    parallel = [graph.parallel(changed, pipefusion=2), 0]
    ways = {"plain": plain, "stock": graph.ksampler(changed, *request, **settings)}
    found = latents(packs, graph, ways | {"ours": graph.ksampler(parallel, *request, **settings)})
    assert relative_difference(found["stock"], found["plain"]) > TELLING
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE


def test_a_method_of_another_packs_class_counts(packs):
    graph = AnyGraph(packs, "unet")
    request, settings = graph.request(), SAMPLING["unet"]
    patched = [graph.add("TestEmbeddings", model=graph.stock(), weight=0.8), 0]
    plain = graph.ksampler(patched, *request, **settings)
    changed = [graph.add("TestReach", model=patched, way="code_of_another_pack", after=plain), 0]
    ways = {"plain": plain, "stock": graph.ksampler(changed, *request, **settings)}
    ours = graph.ksampler([graph.parallel(changed, ulysses=2), 0], *request, **settings)
    found = latents(packs, graph, ways | {"ours": ours})
    assert relative_difference(found["stock"], found["plain"]) > TELLING
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE


def test_another_call_of_the_networks_class_is_refused(packs):
    """By its calls devices share out the work."""
    graph = AnyGraph(packs, "wan_t2v")
    changed = [graph.add("TestReach", model=graph.stock(), way="call_of_a_class"), 0]
    sampled = graph.ksampler([graph.parallel(changed, ulysses=2), 0], *graph.request(), steps=2, cfg=1.0)
    with pytest.raises(PromptFailed, match=r"replaced `__call__` of the class WanModel"):
        latents(packs, graph, {"refused": sampled})


def test_a_weight_in_place_is_refused_where_only_the_devices_have_it(packs):
    """Nobody would see the change of a weight without values."""
    graph = AnyGraph(packs, "flux")
    request = graph.request()
    inputs = {
        "model_name": graph.file,
        "weight_dtype": "default",
        "strategy": graph.strategy("cpu:2", ulysses=2),
    }
    loaded = [graph.add("ParallelModelLoader", **inputs), 0]
    reached = [graph.add("TestReach", model=loaded, way="weight_in_place"), 0]
    sampled = graph.ksampler(reached, *request, steps=2, cfg=1.0)
    with pytest.raises(
        PromptFailed, match=r"weights of the model's file in place .*put the node between a stock"
    ):
        latents(packs, graph, {"refused": sampled})


# Ways that act inside blocks or change weights: under tensor_degree a device has only parts of those. On Wan the way
# attention_of_a_module replaces an attention kernel, which works per head, so it is not refused.
WITHIN = {
    "attention_by_head",
    "attention_override",
    "attention_with_state",
    "child_of_a_block",
    "class_of_a_block",
    "entry_of_a_list",
    "function_of_torch",
    "hook_after",
    "hook_before",
    "injection",
    "layer_of_comfyui",
    "layer_of_torch",
    "method_of_a_block",
    "method_of_a_class",
    "method_of_another_module",
    "new_parameter",
    "object_patch_of_a_child",
    "object_patch_of_a_method",
    "partial_in_a_module",
    "weight_in_place",
    "wrapper_of_a_weight",
}


@pytest.mark.parametrize(
    ("kind", "way"), [*(("flux", way) for way in WAYS), ("wan_t2v", "attention_of_a_module")]
)
def test_a_way_into_sliced_layers_counts_or_is_refused(packs, known, kind, way):
    is_refused = way in WITHIN or (way, kind) == ("attention_of_a_module", "flux")
    graph = AnyGraph(packs, kind)
    request = graph.request()
    changed = [graph.add("TestReach", model=graph.stock(), way=way), 0]
    ways = {"ours": graph.ksampler([graph.parallel(changed, tensor=2), 0], *request, **SAMPLING[kind])}
    if is_refused:
        with pytest.raises(PromptFailed, match="tensor_degree to 1"):
            latents(packs, graph, ways)
        return
    if (kind, way) not in known:
        ways["stock"] = graph.ksampler(changed, *request, **SAMPLING[kind])
    found = latents(packs, graph, ways)
    expected = known.setdefault((kind, way), found.get("stock"))
    assert relative_difference(found["ours"], expected) <= TOLERANCE
