"""GGUF files in Parallel Model Loader give the stock latent of their unpacked weights, also with LoRAs, and Parallel
Flux Loader reads them and other quantised files. Bad files are refused by name."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from any_runs import latents
from comfy_weight_files import OLD
from comfy_weight_files import write as write_quantised
from comfyui_client import PromptFailed
from differences import relative_difference
from gguf_files import write, write_unpacked
from graphs import STOCK, Graph

KIND = "Q4_0"
TOLERANCE = 3e-3  # of the largest value: weights unpack to float16, and the other file has float32
SAMPLING = {"cfg": 2.0, "steps": 2}


@pytest.fixture(scope="module")
def files(comfy):
    """The names of the packed file, of a file with its unpacked weights, and of the file that was packed."""
    folder = comfy.server.base_directory / "models" / "diffusion_models"
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
    request = (graph.text(1), graph.text(2), graph.latent())
    ours = loader(graph, packed, **choice)
    ways = {
        "stock": graph.ksampler(graph.model(STOCK, unpacked), *request, **SAMPLING),
        "whole": graph.ksampler(graph.model(STOCK, whole), *request, **SAMPLING),
        "KSampler": graph.ksampler([ours, 0], *request, **SAMPLING),
        "Parallel Sampler": graph.parallel_sampler([ours, 1], *request, **SAMPLING),
    }
    found = latents(comfy, graph, ways)
    for way in ("KSampler", "Parallel Sampler"):
        assert relative_difference(found[way], found["stock"]) <= TOLERANCE, way
    assert relative_difference(found["whole"], found["stock"]) > 5 * TOLERANCE, "packing takes something away"


@pytest.mark.parametrize("form", ["GGUF", "float8_e4m3fn", OLD, "fp8 e5m2"])
def test_parallel_flux_loader_reads_packed_and_scaled_files(comfy, files, form):
    name, stock_name, whole = files
    if form != "GGUF":
        folder = comfy.server.base_directory / "models" / "diffusion_models"
        name = stock_name = f"tiny_{form.replace(', ', '_').replace(' ', '_')}.safetensors"
        write_quantised(folder / name, form, tensors=load_file(folder / whole))
    graph = Graph()
    strategy = graph.strategy("cpu:2", ulysses=2)
    ours = graph.add("ParallelFluxLoader", unet_name=name, weight_dtype="auto", strategy=strategy)
    request = (graph.text(1), graph.text(2), graph.latent())
    ways = {
        "stock": graph.ksampler(graph.model(STOCK, stock_name), *request, **SAMPLING),
        "ours": graph.ksampler([ours, 1], *request, **SAMPLING),
    }
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= (TOLERANCE if form == "GGUF" else 2e-6)


@pytest.mark.parametrize("way", ["whole", "shared out", "by hooks"])
def test_loras_count_as_on_the_unpacked_weights(comfy, files, loras, way):
    packed, unpacked, _ = files
    graph = Graph()
    request = (graph.text(1), graph.text(2), graph.latent())
    choice = {"shard_weights": True} if way == "shared out" else {}
    ours, stock = [loader(graph, packed, ulysses=2, **choice), 0], graph.model(STOCK, unpacked)
    ways = {"none": graph.ksampler(ours, *request, **SAMPLING)}
    for name, model in (("ours", ours), ("stock", stock)):
        positive = request[0]
        if way == "by hooks":
            hook = graph.add("CreateHookLoraModelOnly", lora_name=loras["kohya"], strength_model=0.8)
            positive = graph.hooked(positive, [hook, 0])
        else:
            model = graph.lora(model, loras["kohya"])
        ways[name] = graph.ksampler(model, positive, *request[1:], **SAMPLING)
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["none"], found["stock"]) > 10 * TOLERANCE


def test_another_dtype_than_its_own_is_refused(comfy, files):
    graph = Graph()
    node = loader(graph, files[0], "fp8_e4m3fn")
    latent = graph.ksampler([node, 0], graph.text(1), graph.text(2), graph.latent())
    with pytest.raises(PromptFailed, match=r"formats of its own .GGUF.; set weight_dtype to default"):
        comfy.sample(graph.prompt, latent)


def test_a_damaged_file_is_refused_with_its_name(comfy, files):
    folder = comfy.server.base_directory / "models" / "diffusion_models"
    (folder / "torn.gguf").write_bytes((folder / files[0]).read_bytes()[:5000])
    graph = Graph()
    node = loader(graph, "torn.gguf")
    latent = graph.ksampler([node, 0], graph.text(1), graph.text(2), graph.latent())
    try:
        with pytest.raises(PromptFailed, match=r"torn\.gguf is refused: it is no whole GGUF file"):
            comfy.sample(graph.prompt, latent)
    finally:
        (folder / "torn.gguf").unlink()  # other tests read the whole list
