"""Requests of every kind, ours against stock on the same file: sizes, batches, masks, prompts, model variants."""

from __future__ import annotations

from math import prod

import pytest
from safetensors.torch import load_file

from graphs import AXES, OURS, STOCK, Graph

TOLERANCE = 1e-4  # of the largest value of the stock latent, in fp32
WAYS = ("stock", "KSampler", "parallel sampler")

# name -> what differs from a plain request: "file" (of the checkpoint), "positive", "negative", "latent", "sampling".
REQUESTS = {
    "plain": {},
    "batch of 3": {"latent": {"batch": 3}},
    "batch of 3 with cfg": {"latent": {"batch": 3}, "sampling": {"cfg": 4.0}},
    "batch_index": {"latent": {"batch": 3, "batch_index": "4,0,2"}},
    "odd height": {"latent": {"width": 16, "height": 13}},
    "odd sides": {"latent": {"width": 17, "height": 13}},
    "image tokens that do not divide by 2": {"latent": {"width": 18, "height": 14}},
    "tiny": {"latent": {"width": 2, "height": 2}},
    "longer text": {"positive": {"tokens": 32}},
    "one word": {"positive": {"tokens": 1}},
    "image to image": {"latent": {"draw": 5}, "sampling": {"denoise": 0.6}},
    "image to image, every step": {"latent": {"draw": 5}},
    "inpainting": {"latent": {"draw": 5, "noise_mask": True}},
    "inpainting a batch, odd sides, cfg": {
        "latent": {"draw": 5, "noise_mask": True, "batch": 3, "width": 17, "height": 13},
        "sampling": {"denoise": 0.6, "cfg": 4.0},
    },
    "cfg": {"sampling": {"cfg": 4.0}},
    "cfg with a longer negative": {"negative": {"tokens": 12}, "sampling": {"cfg": 4.0}},
    "cfg from a copy of the file": {"file": "copy", "sampling": {"cfg": 4.0}},
    "cfg below one": {"sampling": {"cfg": 0.5}},
    "other guidance": {"positive": {"guidance": 1.5}},
    "missing guidance": {"positive": {"guidance": -1.0}},
    "schnell": {"file": "schnell"},
    "schnell with cfg": {"file": "schnell", "sampling": {"cfg": 2.0}},
    "diffusers layout": {"file": "diffusers"},
    "prefixed keys": {"file": "prefixed"},
    "one step": {"sampling": {"steps": 1}},
    "another seed": {"sampling": {"seed": 2**63 + 11}},
    "heads that Ulysses cannot share": {"file": "one head"},
}
FILES = {
    "dev": {"double_blocks": 2, "single_blocks": 2},
    "copy": {"double_blocks": 2, "single_blocks": 2},
    "schnell": {"guidance": False},
    "diffusers": {"layout": "diffusers"},
    "prefixed": {"prefix": "model.diffusion_model."},
    "one head": {"heads": 1, "double_blocks": 2, "single_blocks": 2},
}
RESIDENT = ("euler", "euler_ancestral", "heun", "dpmpp_2m")
ANOTHER = "res_multistep"


@pytest.fixture(scope="module")
def files(comfy):
    return {
        name: comfy.write_flux(f"{name.replace(' ', '_')}.safetensors", **options)
        for name, options in FILES.items()
    }


def sampled(comfy, files, name: str, devices: str, sampler: str, **choice) -> dict:
    """The latents of one request by way, `stock` first; the node's report under "report"."""
    request = REQUESTS[name]
    unet = files[request.get("file", "dev")]
    settings = {"sampler_name": sampler, **request.get("sampling", {})}
    graph = Graph()
    conditioning = (
        graph.text(1, **request.get("positive", {})),
        graph.text(2, **request.get("negative", {})),
        graph.latent(**request.get("latent", {})),
    )
    ours = graph.model(OURS, unet, devices, **choice)
    parallel = graph.parallel_sampler(ours[0], *conditioning, **settings)
    results = {
        "stock": graph.ksampler(graph.model(STOCK, unet), *conditioning, **settings),
        "KSampler": graph.ksampler(ours, *conditioning, **settings),
        "parallel sampler": parallel,
    }
    for way, latent in results.items():
        graph.save(latent, f"request-{way}.safetensors")
    graph.add("TestSaveText", text=[parallel[0], 1], path="request-report.txt")
    comfy.run(graph.prompt, timeout=300)
    latents = {way: load_file(comfy.output(f"request-{way}.safetensors"))["samples"] for way in results}
    return {**latents, "report": comfy.output("request-report.txt").read_text()}


def assert_equal_to_stock(latents: dict) -> None:
    stock = latents["stock"]
    for way in WAYS[1:]:
        assert latents[way].shape == stock.shape
        difference = ((latents[way] - stock).abs().max() / stock.abs().max()).item()
        assert difference <= TOLERANCE, f"{way}: {difference:.1e}\n{latents['report']}"


@pytest.mark.parametrize(
    ("devices", "name"),
    [("cpu:2", name) for name in REQUESTS] + [("cpu:1", name) for name in list(REQUESTS)[::5]],
)
def test_a_request_gives_the_stock_latent(comfy, files, name, devices):
    latents = sampled(comfy, files, name, devices, RESIDENT[list(REQUESTS).index(name) % len(RESIDENT)])
    assert_equal_to_stock(latents)


@pytest.mark.parametrize(
    "name", ["batch_index", "inpainting a batch, odd sides, cfg", "cfg with a longer negative"]
)
def test_a_request_for_another_sampler_gives_the_stock_latent(comfy, files, name):
    latents = sampled(comfy, files, name, "cpu:2", ANOTHER)
    assert_equal_to_stock(latents)


@pytest.mark.parametrize("sampler", RESIDENT)
def test_every_resident_sampler_gives_the_stock_latent_with_cfg(comfy, files, sampler):
    latents = sampled(comfy, files, "inpainting a batch, odd sides, cfg", "cpu:2", sampler)
    assert_equal_to_stock(latents)


def test_the_report_tells_what_ran(comfy, files):
    report = sampled(comfy, files, "cfg", "cpu:2", "heun")["report"]
    for part in (
        "CFG 2",
        "native",
        "cpu:0, cpu:1",
        "median",
        "first",
        "load",
        "MiB",
        "GPU time used",
    ):
        assert part in report


@pytest.mark.parametrize(
    "settings",
    [
        {"ulysses": 2},
        {"ring": 2},
        {"cfg": 2},
        {"data": 2},
        {"ring": 3},
        {"ulysses": 2, "ring": 2},
        {"cfg": 2, "ulysses": 2},
        {"data": 2, "cfg": 2},
        {"ulysses": 2, "shard_weights": True},
        {"cfg": 2, "offload_weights": True},
        {"pipefusion": 2, "warmup_steps": 3},
        {"pipefusion": 2, "cfg": 2, "warmup_steps": 99},
        {"pipefusion": 2, "warmup_steps": 3, "device_shares": "3,1"},
        {"pipefusion": 2, "ulysses": 2, "warmup_steps": 3},
        {"ring": 2, "device_shares": "3,1"},
    ],
    ids=lambda settings: " ".join(f"{name}{value}" for name, value in settings.items()),
)
def test_every_strategy_gives_the_stock_latent(comfy, files, settings):
    world_size = prod(value for name, value in settings.items() if name in AXES)
    latents = sampled(
        comfy, files, "inpainting a batch, odd sides, cfg", f"cpu:{world_size}", "euler", **settings
    )
    assert_equal_to_stock(latents)
    assert "set by hand" in latents["report"].splitlines()[0]
    assert "result: exact" in latents["report"]


def test_flowing_patches_are_called_approximate(comfy, files):
    latents = sampled(comfy, files, "cfg", "cpu:2", "euler", pipefusion=2, num_pipeline_patch=3)
    stock = latents["stock"]
    for way in WAYS[1:]:
        assert (latents[way] - stock).abs().max() > TOLERANCE * stock.abs().max()
    assert "result: approximate (PipeFusion: exact for the first 1 step" in latents["report"]


def test_a_sampler_that_cannot_run_patch_by_patch_is_exact_and_the_report_says_so(comfy, files):
    latents = sampled(comfy, files, "cfg", "cpu:2", ANOTHER, pipefusion=2)
    assert_equal_to_stock(latents)
    assert "result: exact" in latents["report"]
    assert (
        "PipeFusion ran exactly and without its speed: patches cannot take the steps of" in latents["report"]
    )


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=lambda degrees: next(iter(degrees)))
@pytest.mark.parametrize("name", ["plain", "inpainting a batch, odd sides, cfg"])
def test_the_xfuser_engine_gives_the_stock_latent(comfy, files, name, degrees):
    latents = sampled(comfy, files, name, "cpu:2", "euler", engine="xfuser", **degrees)
    assert_equal_to_stock(latents)
    assert "engine: xfuser" in latents["report"].splitlines()


def test_guidance_really_reaches_the_ranks(comfy, files):
    """The negative control: were the comparison blind, these two would be equal as well."""
    latents = {}
    for guidance in (3.0, 3.5):
        graph = Graph()
        texts = graph.text(1, guidance=guidance), graph.text(2)
        ours = graph.model(OURS, files["dev"], "cpu:2")
        latents[guidance] = [
            comfy.sample(graph.prompt, result)
            for result in (
                graph.parallel_sampler(ours[0], *texts, graph.latent()),
                graph.ksampler(ours, *texts, graph.latent()),
            )
        ]
    for low, high in zip(latents[3.0], latents[3.5], strict=True):
        assert (low - high).abs().max() > 100 * TOLERANCE * high.abs().max()


def test_the_same_request_gives_the_same_bits_again(comfy, files):
    """From a copy of the file, so that no node's cached output can answer the second time."""
    first = sampled(comfy, files, "cfg", "cpu:2", "euler_ancestral")
    second = sampled(comfy, files, "cfg from a copy of the file", "cpu:2", "euler_ancestral")
    for way in WAYS:
        assert first[way].equal(second[way])
