"""ldm tensors to diffusers' decoder: the same image, no copy on the CPU, and only what decoding needs."""

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.models.vae.module import load_vae
from tiny_vae import dims_of, ldm_tensors, random_latent, random_vae

CPU = torch.device("cpu")


@pytest.mark.parametrize("dims", [dims_of(), dims_of(post_quant=True, channels=4)], ids=["flux", "sd"])
def test_it_decodes_as_diffusers_own(dims):
    vae = random_vae(dims)
    latent = random_latent(dims, 5, 7, batch=2)
    model = load_vae(ldm_tensors(vae, dims), CPU)
    with torch.inference_mode():
        assert torch.equal(model.decoder(latent), vae.decode(latent).sample)
    assert model.dims == dims


def test_float32_tensors_are_used_where_they_are():
    dims = dims_of()
    tensors = ldm_tensors(random_vae(dims), dims)
    model = load_vae(tensors, CPU)
    mine = {parameter.data_ptr() for parameter in model.decoder.parameters()}
    assert mine == {tensor.data_ptr() for tensor in tensors.values()}
    assert model.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_half_precision_is_computed_in_float32_on_the_cpu():
    dims = dims_of()
    tensors = {key: tensor.bfloat16() for key, tensor in ldm_tensors(random_vae(dims), dims).items()}
    model = load_vae(tensors, CPU)
    assert model.compute_dtype == torch.float32
    assert {parameter.dtype for parameter in model.decoder.parameters()} == {torch.float32}


def test_other_tensors_are_refused():
    dims = dims_of()
    tensors = ldm_tensors(random_vae(dims), dims)
    del tensors["decoder.up.1.block.0.norm2.bias"]
    with pytest.raises(RequestError, match=r"norm2.bias is missing"):
        load_vae(tensors, CPU)
