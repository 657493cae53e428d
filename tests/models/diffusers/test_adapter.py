"""diffusers' Flux with the signature of ComfyUI's module, compared with ComfyUI's own on the same weights."""

import pytest
import torch

from adapted_flux import CALLS, adapted, comfyui_flux
from comfy_modules import import_comfyui_here
from parallel_backend.errors import RequestError

EXACT = 1e-5  # relative to the largest value


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import_comfyui_here()
    path = tmp_path_factory.mktemp("adapter") / "flux.safetensors"
    return adapted(path).module, comfyui_flux(path)


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_the_adapter_answers_as_comfyuis_module(models, name):
    args, kwargs = CALLS[name]()
    theirs = models[1](*args, **CALLS[name]()[1])
    ours = models[0](*args, **kwargs)
    assert (ours - theirs).abs().max() <= EXACT * theirs.abs().max()


@pytest.mark.parametrize(
    "changed", ["timestep", "context", "y", "guidance", "ref_latents", "control", "attention_mask"]
)
@torch.inference_mode()
def test_every_argument_matters(models, changed):
    """A changed or missing argument changes the answer by more than 100 times the tolerance above."""
    args, kwargs = CALLS["a reference" if changed == "ref_latents" else "everything"]()
    expected = models[0](*args, **kwargs)
    if changed == "timestep":
        args = (args[0], args[1] / 2)
    elif changed == "context":
        kwargs["context"] = kwargs["context"].flip(1)[:, :11]
        kwargs["context"][:, 0] += 1
    else:
        kwargs[changed] = None
    assert (models[0](*args, **kwargs) - expected).abs().max() > 100 * EXACT * expected.abs().max()


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"transformer_options": {"patches": {"post_input": [print]}}}, "patches"),
        (
            {"transformer_options": {"patches_replace": {"dit": {("double_block", 0): print}}}},
            "patches_replace",
        ),
        ({"transformer_options": {"optimized_attention_override": print}}, "optimized_attention_override"),
        ({"transformer_options": {"wrappers": {"diffusion_model": {None: [print]}}}}, "wrappers"),
        ({"pulid": 1.0}, "pulid"),
        ({"ref_latents_method": "index_timestep_zero"}, "index_timestep_zero"),
    ],
)
def test_what_only_comfyuis_module_takes_is_refused_by_name(models, kwargs, name):
    args, usual = CALLS["a reference"]()
    with pytest.raises(RequestError, match=rf"{name}.*implementation comfyui"):
        models[0](*args, **usual | kwargs)


def test_what_samplers_put_beside_is_taken(models):
    args, kwargs = CALLS["odd sides"]()
    expected = models[0](*args, **kwargs)
    usual = {"cond_or_uncond": [0, 1], "sigmas": torch.tensor([0.5]), "patches": {}, "wrappers": {}}
    assert torch.equal(models[0](*args, **kwargs, transformer_options=usual), expected)
