"""Nodes that need weights which only the ranks have: they merge and save models, and extract LoRAs. None may train."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from any_graphs import AnyGraph
from any_runs import TOLERANCE, compared, latents
from comfyui_client import PromptFailed
from differences import relative_difference
from gguf_files import write, write_unpacked
from graphs import OURS, STOCK, Graph

SAMPLING = {"cfg": 2.0, "steps": 2}


@pytest.fixture(scope="module")
def files(comfy):
    blocks = {"double_blocks": 1, "single_blocks": 2}
    return tuple(comfy.write_flux(f"tiny_merge_{seed}.safetensors", seed=seed, **blocks) for seed in (3, 9))


def merge(graph: Graph, models: list, node: str = "ModelMergeSimple", **inputs) -> list:
    return [graph.add(node, model1=models[0], model2=models[1], **inputs), 0]


def assert_same(comfy, graph: Graph, merged: dict[str, list], tolerance: float = TOLERANCE) -> None:
    """Samples the models OURS and STOCK of the graph in one prompt and compares their latents."""
    compared(comfy, graph, graph.sampled_by(merged, graph.request(), **SAMPLING), tolerance)


@pytest.mark.parametrize(("first", "second"), [(OURS, OURS), (OURS, STOCK), (STOCK, OURS)])
def test_a_merge_of_two_models_gives_the_stock_latent(comfy, files, first, second):
    """Either model may be stock: ranks map the second model's file, and a stock model gets views of the mapped file."""
    graph, merged = Graph(), {}
    for name, kinds in {OURS: (first, second), STOCK: (STOCK, STOCK)}.items():
        models = [graph.model(kind, file) for kind, file in zip(kinds, files, strict=True)]
        merged[name] = merge(graph, models, ratio=0.5)
    assert_same(comfy, graph, merged)


@pytest.mark.parametrize(
    "choice", [{"ulysses": 2, "shard_weights": True}, {"pipefusion": 2, "warmup_steps": 2}]
)
def test_a_merge_of_a_merge_is_shared_out_too(comfy, files, choice):
    graph, merged = Graph(), {}
    for kind in (OURS, STOCK):
        one, two = (graph.model(kind, file, **choice) for file in files)  # stock takes no choice
        difference = merge(graph, [two, one], "ModelMergeSubtract", multiplier=0.7)
        merged[kind] = merge(graph, [one, difference], "ModelMergeAdd")
    assert_same(comfy, graph, merged)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("flux", {"ulysses": 2}),
        ("flux", {"ulysses": 2, "shard_weights": True}),
        ("flux", {"tensor": 2}),
        ("wan_t2v", {"tensor": 2}),
        ("flux in bf16", {"ulysses": 2, "shard_weights": True}),
    ],
)
def test_a_merge_with_the_same_model_takes_whole_weights_without_the_last_jobs_lora(
    comfy, loras, kind, choice
):
    """The ranks hold the second model's weights, as parts or with an earlier job's LoRA in them. A bf16 file is
    compared with whole weights in the ranks: stock on a CPU holds it in fp32 and does not round what a merge changes.
    """
    in_bf16 = comfy.write_flux("any_flux_bf16.safetensors", dtype=torch.bfloat16)
    graph = AnyGraph(comfy, kind.partition(" ")[0], in_bf16 if "bf16" in kind else "")
    found, request, stock = {}, graph.request(), graph.stock()
    expected = [graph.parallel(stock, ulysses=2), 0] if "bf16" in kind else stock
    for name, model in {"ours": [graph.parallel(stock, **choice), 0], "expected": expected}.items():
        first = graph.lora(model, loras["kohya"]) if graph.kind == "flux" else model
        merged = merge(graph, [first, model], ratio=0.4)
        found[f"{name} before"] = graph.ksampler(first, *request, **SAMPLING)
        found[f"{name} merged"] = graph.ksampler(merged, *request, **SAMPLING)
    found = latents(comfy, graph, found)
    for job in ("before", "merged"):
        assert relative_difference(found[f"ours {job}"], found[f"expected {job}"]) <= TOLERANCE, job


def test_a_merge_takes_the_weights_that_a_node_has_changed_in_place(packs):
    graph = AnyGraph(packs, "wan_t2v")
    request = graph.request()
    changed = [graph.add("TestReach", model=graph.stock(), way="weight_in_place"), 0]
    models = {OURS: [graph.parallel(changed, ulysses=2), 0], STOCK: changed}
    merged = {kind: merge(graph, [model, model], ratio=0.4) for kind, model in models.items()}
    ways = graph.sampled_by(merged, request, **SAMPLING)
    undone = graph.add("TestUndo", model=changed, after=ways[STOCK], and_after=ways[OURS])
    compared(packs, graph, ways | {"without": graph.ksampler([undone, 0], *request, **SAMPLING)})


def test_a_packed_second_model_is_unpacked_as_it_is_merged(comfy, files):
    folder = comfy.models()
    tensors = load_file(folder / files[1])
    write(folder / "tiny_packed_merge.gguf", "Q8_0", tensors=tensors)
    write_unpacked(folder / "tiny_unpacked_merge.safetensors", "Q8_0", tensors=tensors)
    graph = Graph()
    strategy = graph.strategy("cpu:2", ulysses=2)
    packed = {"model_name": "tiny_packed_merge.gguf", "weight_dtype": "default", "strategy": strategy}
    seconds = {
        OURS: [graph.add("ParallelModelLoader", **packed), 0],
        STOCK: graph.model(STOCK, "tiny_unpacked_merge.safetensors"),
    }
    merged = {
        kind: merge(graph, [graph.model(kind, files[0]), two], ratio=0.5) for kind, two in seconds.items()
    }
    assert_same(comfy, graph, merged, 3e-3)  # weights unpack in float16


def saved(comfy, files, save) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors that `save(graph, models, prefix)` has ComfyUI save for two stock models and for two ours."""
    graph, found = Graph(), []
    for kind in (STOCK, OURS):
        save(graph, [graph.model(kind, file) for file in files], f"saved-{kind}")
    comfy.run(graph.prompt)
    for kind in (STOCK, OURS):
        (file,) = comfy.server.output_directory.glob(f"saved-{kind}_*.safetensors")
        found.append(load_file(file))
        file.unlink()
    assert found[0] and found[0].keys() == found[1].keys()
    return found


def test_a_merge_is_saved_as_stock_saves_it(comfy, files):
    def save(graph: Graph, models: list, prefix: str) -> None:
        graph.add("ModelSave", model=merge(graph, models, ratio=0.3), filename_prefix=prefix)

    stock, ours = saved(comfy, files, save)
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(("kind_of_lora", "bias_diff"), [("standard", False), ("full_diff", True)])
def test_a_lora_is_extracted_as_stock_extracts_it(comfy, files, kind_of_lora, bias_diff):
    def save(graph: Graph, models: list, prefix: str) -> None:
        difference = merge(graph, models[::-1], "ModelMergeSubtract", multiplier=1.0)
        inputs = {"rank": 4, "lora_type": kind_of_lora, "bias_diff": bias_diff}
        graph.add("LoraSave", model_diff=difference, filename_prefix=prefix, **inputs)

    stock, ours = map(_changes, saved(comfy, files, save))
    for name, value in stock.items():
        worst = 1e-2 * float(value.abs().max())
        torch.testing.assert_close(ours[name], value, rtol=0, atol=worst, msg=name)


TRAINING = {
    "batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 1e-4, "rank": 4, "optimizer": "AdamW",
    "loss_function": "MSE", "seed": 0, "training_dtype": "fp32", "lora_dtype": "fp32", "quantized_backward": False,
    "algorithm": "LoRA", "gradient_checkpointing": False, "checkpoint_depth": 1, "offloading": False,
    "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": False,
}  # fmt: skip


def test_training_on_weights_that_the_devices_have_is_refused(comfy, unet):
    graph = Graph()
    model = graph.model(OURS, unet)
    request = {"latents": graph.latent(draw=3), "positive": graph.text(1)}
    node = graph.add("TrainLoraNode", model=model, **request, **TRAINING)
    graph.add("SaveLoRA", lora=[node, 0], prefix="ours")
    with pytest.raises(PromptFailed, match="a copy of its weights") as failure:
        comfy.run(graph.prompt)
    assert (failure.value.node_id, failure.value.exception_type.rpartition(".")[2]) == (node, "RequestError")
    assert not list(comfy.server.output_directory.glob("ours*"))


def _changes(lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what a LoRA adds to each weight. Its factors cannot be compared: a decomposition chooses their signs."""
    downs = {name: value for name, value in lora.items() if name.endswith(".lora_down.weight")}
    products = {
        name: lora[name.replace(".lora_down.", ".lora_up.")].float() @ value.float()
        for name, value in downs.items()
    }
    return products | {name: value.float() for name, value in lora.items() if ".lora_" not in name}
