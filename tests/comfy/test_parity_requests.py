"""Requests of every kind give the stock latent of the same file: sizes, batches, masks, prompts, model variants."""

from __future__ import annotations

import pytest

from any_runs import TOLERANCE, compared, latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph, devices_of

# name -> differences from a plain request, by "file" (of FILES), "positive", "negative", "latent" and "sampling".
REQUESTS = {
    "plain": {},
    "batch of 3": {"latent": {"batch": 3}},
    "batch_index": {"latent": {"batch": 3, "batch_index": "4,0,2"}},
    "odd sides": {"latent": {"width": 17, "height": 13}},
    "tiny": {"latent": {"width": 2, "height": 2}},
    "longer text": {"positive": {"tokens": 32}},
    "one word": {"positive": {"tokens": 1}},
    "image to image": {"latent": {"draw": 5}, "sampling": {"denoise": 0.6}},
    "inpainting a batch, odd sides, cfg": {
        "latent": {"draw": 5, "noise_mask": True, "batch": 3, "width": 17, "height": 13},
        "sampling": {"denoise": 0.6, "cfg": 4.0},
    },
    "cfg": {"sampling": {"cfg": 4.0}},
    "cfg with a longer negative": {"negative": {"tokens": 12}, "sampling": {"cfg": 4.0}},
    "cfg below one": {"sampling": {"cfg": 0.5}},
    "missing guidance": {"positive": {"guidance": -1.0}},
    "schnell": {"file": "schnell"},
    "diffusers layout": {"file": "diffusers"},
    "prefixed keys": {"file": "prefixed"},
    "one step": {"sampling": {"steps": 1}},
    "another seed": {"sampling": {"seed": 2**63 + 11}},
    "heads that Ulysses cannot share": {"file": "one head"},
}
FILES = {
    "dev": {"double_blocks": 2, "single_blocks": 2},
    "schnell": {"guidance": False},
    "diffusers": {"layout": "diffusers"},
    "prefixed": {"prefix": "model.diffusion_model."},
    "one head": {"heads": 1, "double_blocks": 2, "single_blocks": 2},
}
ANOTHER = "res_multistep"  # PipeFusion's patches cannot take its steps
HARDEST = "inpainting a batch, odd sides, cfg"


@pytest.fixture(scope="module")
def files(comfy):
    return {
        name: comfy.write_flux(f"{name.replace(' ', '_')}.safetensors", **options)
        for name, options in FILES.items()
    }


WAYS = ("KSampler", "Parallel Sampler")


def sampled(comfy, files, name: str, devices: str, run=compared, by=WAYS, **choice) -> dict:
    """Samples one request on stock, on our MODEL and by Parallel Sampler (`by`). `run`: `latents`, which returns their
    latents and a report, or `compared`, which also asserts that they are equal."""
    request = REQUESTS[name]
    unet = files[request.get("file", "dev")]
    settings = {"sampler_name": choice.pop("sampler", "euler"), **request.get("sampling", {})}
    graph = Graph()
    conditioning = (
        graph.text(1, **request.get("positive", {})),
        graph.text(2, **request.get("negative", {})),
        graph.latent(**request.get("latent", {})),
    )
    ours = graph.model(OURS, unet, devices, **choice)
    models = {"stock": graph.model(STOCK, unet)} | {way: [ours[0], int(way == "KSampler")] for way in by}
    return run(comfy, graph, graph.sampled_by(models, conditioning, **settings))


@pytest.mark.parametrize(
    ("devices", "way", "name"),
    [("cpu:2", "Parallel Sampler", name) for name in REQUESTS]
    + [("cpu:1", "KSampler", name) for name in list(REQUESTS)[::5]],
)
def test_a_request_gives_the_stock_latent(comfy, files, devices, way, name):
    """Both samplers call one function of ComfyUI with the values of their inputs."""
    sampled(comfy, files, name, devices, by=(way,))


@pytest.mark.parametrize(  # grouped by the number of devices, so that each group of ranks starts once
    "settings",
    [
        {"ulysses": 2, "shard_weights": True},
        {"cfg": 2, "offload_weights": True},
        {"pipefusion": 2, "warmup_steps": 3, "device_shares": "3,1"},
        {"ring": 2, "device_shares": "3,1"},
        {"ulysses": 2, "engine": "xfuser"},
        {"ring": 2, "engine": "xfuser"},
        {"pipefusion": 2, "cfg": 2, "warmup_steps": 99},
        {"pipefusion": 2, "ulysses": 2, "warmup_steps": 3},
    ],
    ids=lambda settings: " ".join(f"{name}{value}" for name, value in settings.items()),
)
def test_every_strategy_gives_the_stock_latent(comfy, files, settings):
    found = sampled(comfy, files, HARDEST, devices_of(settings), **settings)
    report = dict(line.split(": ", 1) for line in found["report"].splitlines())
    assert "set by hand" in report["strategy"] and report["result"].startswith("exact")
    assert report["engine"] == settings.get("engine", "native")
    assert report["devices"].startswith("cpu:0, cpu:1")
    assert report["moved between devices"].endswith(" MiB")


def test_flowing_patches_are_called_approximate(comfy, files):
    found = sampled(comfy, files, "cfg", "cpu:2", latents, pipefusion=2, num_pipeline_patch=3)
    for way in ("KSampler", "Parallel Sampler"):
        assert relative_difference(found[way], found["stock"]) > TOLERANCE
    assert "result: approximate (PipeFusion: exact for the first 1 step" in found["report"]


def test_a_sampler_that_cannot_run_patch_by_patch_is_exact_and_the_report_says_so(comfy, files):
    report = sampled(comfy, files, "cfg", "cpu:2", sampler=ANOTHER, pipefusion=2)["report"]
    assert "result: exact" in report
    assert "PipeFusion ran exactly and without its speed: patches cannot take the steps of" in report
