"""GGUF files in Parallel Model Loader give the stock latent of their unpacked weights, also with LoRAs, and Parallel
Flux Loader reads them and other quantised files. Files may have any key layout and prefix; bad ones are refused."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from any_runs import compared, refusal
from comfy_weight_files import OLD
from comfy_weight_files import write as write_quantised
from gguf_files import write, write_unpacked
from graphs import STOCK, Graph

KIND = "Q4_0"
TOLERANCE = 3e-3  # of the largest value: weights unpack to float16, and the other file has float32
SAMPLING = {"cfg": 2.0, "steps": 2}


@pytest.fixture(scope="module")
def files(comfy):
    """The names of the packed file, of a file with its unpacked weights, and of the file that was packed."""
    folder = comfy.models()
    whole = comfy.write_flux("tiny_whole.safetensors")
    tensors = load_file(folder / whole)
    write(folder / "tiny_packed.gguf", KIND, tensors=tensors)
    write_unpacked(folder / "tiny_unpacked.safetensors", KIND, tensors=tensors)
    return "tiny_packed.gguf", "tiny_unpacked.safetensors", whole


def loader(graph: Graph, name: str, weight_dtype: str = "default", **choice) -> str:
    strategy = graph.strategy("cpu:2", **choice)
    return graph.add("ParallelModelLoader", model_name=name, weight_dtype=weight_dtype, strategy=strategy)


@pytest.mark.parametrize("choice", [{"ulysses": 2}, {"cfg": 2, "shard_weights": True}])
def test_a_file_gives_the_latent_of_what_it_unpacks_to(comfy, files, choice):
    packed, unpacked, whole = files
    graph = Graph()
    request = graph.request()
    ours = loader(graph, packed, **choice)
    models = {"stock": graph.model(STOCK, unpacked), "KSampler": [ours, 0], "Parallel Sampler": [ours, 1]}
    if "cfg" in choice:  # packing takes something away
        models["without"] = graph.model(STOCK, whole)
    compared(comfy, graph, graph.sampled_by(models, request, **SAMPLING), TOLERANCE)


@pytest.mark.parametrize("form", ["GGUF", "float8_e4m3fn", OLD, "fp8 e5m2"])
def test_parallel_flux_loader_reads_packed_and_scaled_files(comfy, files, form):
    name, stock_name, whole = files
    if form != "GGUF":
        folder = comfy.models()
        name = stock_name = f"tiny_{form.replace(', ', '_').replace(' ', '_')}.safetensors"
        write_quantised(folder / name, form, tensors=load_file(folder / whole))
    graph = Graph()
    models = {"stock": graph.model(STOCK, stock_name), "ours": graph.model("ours", name, ulysses=2)}
    ways = graph.sampled_by(models, graph.request(), **SAMPLING)
    compared(comfy, graph, ways, TOLERANCE if form == "GGUF" else 2e-6)


@pytest.mark.parametrize("way", ["whole", "shared out", "by hooks"])
def test_loras_count_as_on_the_unpacked_weights(comfy, files, loras, way):
    packed, unpacked, _ = files
    graph = Graph()
    positive, *others = graph.request()
    choice = {"shard_weights": True} if way == "shared out" else {}
    ours, stock = [loader(graph, packed, ulysses=2, **choice), 0], graph.model(STOCK, unpacked)
    ways = {"without": graph.ksampler(ours, positive, *others, **SAMPLING)}
    if way == "by hooks":
        hook = graph.add("CreateHookLoraModelOnly", lora_name=loras["kohya"], strength_model=0.8)
        positive = graph.hooked(positive, [hook, 0])
    else:
        ours, stock = (graph.lora(model, loras["kohya"]) for model in (ours, stock))
    ways |= graph.sampled_by({"ours": ours, "stock": stock}, (positive, *others), **SAMPLING)
    compared(comfy, graph, ways, TOLERANCE)


def test_another_dtype_than_its_own_is_refused(comfy, files):
    graph = Graph()
    latent = graph.ksampler([loader(graph, files[0], "fp8_e4m3fn"), 0], *graph.request())
    refusal(comfy, graph, latent, r"formats of its own .GGUF.; set weight_dtype to default")
