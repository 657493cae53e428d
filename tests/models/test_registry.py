"""The registry of providers: a spec without a family gets the first one, and an unknown family is refused."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.models.registry import PROVIDERS, inspect_model, load_model, provider_of
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux


def test_a_spec_without_a_family_means_the_first_provider():
    assert provider_of(ModelSpec("x.safetensors").family) is PROVIDERS[0]
    assert provider_of(PROVIDERS[0].name) is PROVIDERS[0]


def test_a_family_that_no_provider_has_is_refused_by_name():
    with pytest.raises(RequestError, match="model family 'sd3' is unknown; this version knows flux"):
        provider_of("sd3")


def test_a_provider_tells_of_a_file_what_it_loads(tmp_path):
    path = str(write_tiny_flux(tmp_path / "x.safetensors", heads=2, double_blocks=1, single_blocks=2))
    file, model = inspect_model(path), load_model(ModelSpec(path), torch.device("cpu"))
    assert (file.shape.heads, file.shape.blocks) == (2, 3)
    assert model.bytes == file.tensor_bytes and model.stored_dtype == file.dtype == "float32"
    transformer = model.module.transformer
    assert (len(transformer.transformer_blocks), len(transformer.single_transformer_blocks)) == (1, 2)
