"""diffusers' Flux with the signature of ComfyUI's module, compared with ComfyUI's own on the same weights."""

import pytest
import torch

from adapted_flux import CALLS, SIZES, adapted, comfyui_flux
from comfy_modules import import_comfyui_here
from parallel_backend.models.diffusers.adapter import image_ids
from tiny_flux import write_tiny_flux

EXACT = 1e-5  # relative to the largest value


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import_comfyui_here()
    path = write_tiny_flux(tmp_path_factory.mktemp("adapter") / "flux.safetensors", **SIZES)
    return adapted(path).module, comfyui_flux(path)


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_the_adapter_answers_as_comfyuis_module(models, name):
    args, kwargs = CALLS[name]()
    theirs = models[1](*args, **CALLS[name]()[1])
    ours = models[0](*args, **kwargs)
    assert (ours - theirs).abs().max() <= EXACT * theirs.abs().max()


@pytest.mark.parametrize("changed", ["timestep", "context", "y", "guidance"])
@torch.inference_mode()
def test_every_argument_matters(models, changed):
    """A changed argument changes the answer by more than 100 times the tolerance above."""
    args, kwargs = CALLS["odd sides"]()
    expected = models[0](*args, **kwargs)
    if changed == "timestep":
        args = (args[0], args[1] / 2)
    else:
        kwargs[changed] = 2 * kwargs[changed]
    assert (models[0](*args, **kwargs) - expected).abs().max() > 100 * EXACT * expected.abs().max()


def test_positions_of_a_large_image_are_exact():
    # bf16 would round everything above 256.
    assert image_ids(2, 1026)[-1].tolist() == [0.0, 0.0, 512.0]
    assert len(set(image_ids(1026, 2)[:, 1].tolist())) == 513
