"""A VAE that ComfyUI's own detection builds from the tensors that were sent: without copies, whole, or refused."""

import pytest
import torch

from comfy_modules import CPU, import_comfyui_here
from other_vaes import BANDED, decoded
from other_vaes import build as other_vae
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.rows.vae_halves import load_comfyui_vae
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.vae_networks import decoding_tensors, told_beside
from video_vaes import build


@pytest.fixture(scope="module")
def source():
    return import_comfyui_here()


def sent():
    """Of a narrow VAE of Wan 2.1's kind."""
    return decoding_tensors(build("wan 2.1"))


def test_it_decodes_as_the_network_that_was_sent(source):
    vae, latent = load_comfyui_vae(sent(), source, CPU), random(1, 16, 2, 3, 2)
    with torch.inference_mode():
        found, expected = vae.decode(latent), build("wan 2.1").decode(latent)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (vae.latent_channels, vae.latent_dims, vae.compute_dtype) == (16, 3, torch.float32)


def test_it_holds_what_was_sent_and_no_encoder(source):
    """On the CPU, where the tensors are pages that all ranks share."""
    tensors = sent()
    vae = load_comfyui_vae(tensors, source, CPU)
    parameters = dict(vae.decoder.named_parameters())
    assert parameters.keys() == {name for name in tensors if not name.startswith("encoder.")}
    assert all(value.data_ptr() == tensors[name].data_ptr() for name, value in parameters.items())
    assert vae.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_half_precision_is_computed_in_float32_on_the_cpu(source):
    vae = load_comfyui_vae({name: tensor.bfloat16() for name, tensor in sent().items()}, source, CPU)
    assert {value.dtype for value in vae.decoder.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_a_vae_with_missing_weights_is_refused(source):
    tensors = sent()
    del tensors["decoder.middle.0.residual.2.weight"]
    with pytest.raises(RequestError, match="lacks 1 tensors of its decoder, such as decoder"):
        load_comfyui_vae(tensors, source, CPU)


def test_a_network_that_is_not_shared_out_is_refused(source):
    from comfy.ldm.cascade.stage_a import StageA

    with pytest.raises(RequestError, match="builds StageA for this VAE"):
        load_comfyui_vae(StageA().state_dict(), source, CPU)


@pytest.mark.parametrize("name", ["ltx with noise", "taef2", "taehv"])
def test_what_tensors_do_not_tell_is_told_beside_them(source, name):
    """LTX's blocks, the channels of TAEF2's latents, the scale of TAEHV's, which ComfyUI reads off its file's dtype."""
    case = BANDED[name]
    network, latent = other_vae(case), random(1, case.channels, *((2,) if case.dims == 3 else ()), 3, 2)
    vae = load_comfyui_vae(
        decoding_tensors(network), source, CPU, told_beside(network, latent_channels=case.channels)
    )
    with torch.inference_mode():
        found, expected = vae.decode(latent), decoded(network, latent[0])
    found = (found[0] if found.ndim == 5 else found[0][:, None]).permute(1, 2, 3, 0)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
