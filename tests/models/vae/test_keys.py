"""The decoder's key map: complete, in both directions, and strict about any other network."""

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.models.vae.keys import decoder_keys, diffusers_names, ldm_shapes, read_dims
from tiny_vae import dims_of, ldm_tensors, random_vae

FLUX, SD = dims_of(), dims_of(post_quant=True, channels=4)


@pytest.mark.parametrize("dims", [FLUX, SD], ids=["flux", "sd"])
def test_the_map_names_every_tensor_of_diffusers_decoder_once(dims):
    theirs = {
        n: tuple(p.shape) for n, p in random_vae(dims).named_parameters() if not n.startswith("encoder")
    }
    theirs = {name: shape for name, shape in theirs.items() if not name.startswith("quant_conv")}
    names = diffusers_names(dims)
    assert sorted(names.values()) == sorted(theirs)
    for key, shape in ldm_shapes(dims).items():
        flat = shape[:2] if ".attn_1." in key and len(shape) == 4 else shape
        assert theirs[names[key]] == flat


@pytest.mark.parametrize(
    "dims",
    [FLUX, SD, dims_of(widths=(64, 32, 96)), dims_of(widths=(128, 256, 512, 512))],
    ids=["flux", "sd", "three levels, not growing", "full size"],
)
def test_dims_are_read_back_from_the_shapes(dims):
    assert read_dims(ldm_shapes(dims)) == dims


def test_the_encoder_is_left_out():
    shapes = {**ldm_shapes(SD), "encoder.conv_in.weight": (1, 2, 3, 3), "quant_conv.weight": (8, 8, 1, 1)}
    assert read_dims(shapes) == SD
    assert set(decoder_keys(shapes)) == set(ldm_shapes(SD))


def _without(name):
    return {key: shape for key, shape in ldm_shapes(FLUX).items() if key != name}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({}, "not built like"),
        ({"decoder.1.weight": (64, 16, 3, 3)}, "not built like"),
        (_without("decoder.up.2.block.1.conv2.bias"), "decoder.up.2.block.1.conv2.bias is missing, not"),
        (_without("decoder.mid.attn_1.q.weight"), "decoder.mid.attn_1.q.weight is missing"),
        ({**ldm_shapes(FLUX), "decoder.up.1.attn.0.q.weight": (64, 64, 1, 1)}, "up.1.attn.0.q.weight is"),
        ({**ldm_shapes(FLUX), "decoder.conv_in.weight": (128, 16, 3, 3, 3)}, "conv_in.weight is"),
        ({**ldm_shapes(FLUX), "bn.running_mean": (64,)}, "normalises its latents"),
        (ldm_shapes(dims_of(widths=(24, 48))), "do not divide by 32"),
    ],
)
def test_another_network_is_refused_in_words(shapes, words):
    with pytest.raises(RequestError, match="it") as refused:
        read_dims(shapes)
    assert words in str(refused.value)


def test_the_tiny_vae_round_trips_through_ldm_names():
    vae = random_vae(FLUX)
    tensors = ldm_tensors(vae, FLUX)
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == ldm_shapes(FLUX)
    back = {diffusers_names(FLUX)[key]: tensor for key, tensor in tensors.items()}
    state = vae.state_dict()
    assert all(torch.equal(tensor.reshape(state[name].shape), state[name]) for name, tensor in back.items())
