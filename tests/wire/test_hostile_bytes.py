"""The parsers of frames and files raise no error but their own refusals, whatever the input."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from hostile_bytes import FRAMES, PAYLOADS, damaged, parse_file, parse_frame, parse_heartbeat, parse_payload
from tiny_flux import tiny_flux_tensors

pytest.importorskip("fcntl")

FEW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(damaged(FRAMES))
def test_frames(data):
    parse_frame(data)


@FEW
@given(damaged(PAYLOADS))
def test_payloads(data):
    parse_payload(data)


@pytest.fixture(scope="module")
def flux_bytes():
    tensors = tiny_flux_tensors(heads=1, context_dim=8, pooled_dim=8)
    return save({name: tensor[:1].contiguous() for name, tensor in tensors.items()})


def test_files(flux_bytes, tmp_path):
    @FEW
    @given(damaged([flux_bytes[: 2**16], *PAYLOADS]))
    def check(data):
        parse_file(data, tmp_path / "hostile.safetensors")

    check()


@FEW
@given(st.binary(min_size=1, max_size=200))
def test_notes_of_ranks(data):
    parse_heartbeat(data)
