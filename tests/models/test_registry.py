"""The registry of providers: a spec without a family gets the first one, and an unknown family is refused."""

from __future__ import annotations

import pytest

from parallel_backend.errors import RequestError
from parallel_backend.models.registry import PROVIDERS, provider_of
from parallel_backend.requests import ModelSpec


def test_a_spec_without_a_family_means_the_first_provider():
    assert provider_of(ModelSpec("x.safetensors").family) is PROVIDERS[0]
    assert provider_of(PROVIDERS[0].name) is PROVIDERS[0]


def test_a_family_that_no_provider_has_is_refused_by_name():
    with pytest.raises(RequestError, match="model family 'sd3' is unknown; this version knows flux"):
        provider_of("sd3")
