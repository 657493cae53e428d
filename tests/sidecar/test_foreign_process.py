"""A foreign process that connects to the open sockets of a group of ranks is ignored, and latents stay right."""

from __future__ import annotations

import os
import pickle
import socket

import psutil
import pytest
import torch

from flux_requests import flux_request
from hostile_bytes import Touches
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux

TWO = Placement(ParallelStrategy(ulysses_degree=2))


def _listening(pid: int) -> list[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("inet")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


@pytest.fixture
def served(two_real_ranks, tmp_path):
    """Returns the spec of a model that the ranks hold, and the latent that they sampled."""
    spec = ModelSpec(str(write_tiny_flux(tmp_path / "tiny.safetensors")))
    return spec, two_real_ranks.sample(spec, flux_request(), TWO).latent


def test_what_listens_takes_no_message_of_a_stranger(two_real_ranks, served, tmp_path):
    spec, expected = served
    mark, pids = tmp_path / "was unpickled", two_real_ranks.pids
    garbage = pickle.dumps(Touches(mark))
    addresses = [address for pid in pids for address in _listening(pid)]
    assert all(ip.startswith("127.") or ip == "::1" for ip, _ in addresses), addresses
    held = []
    for address in addresses:
        stranger = socket.create_connection(address, timeout=5)
        stranger.sendall(garbage * 100)
        held.append(stranger)
    again = two_real_ranks.sample(spec, flux_request(), TWO).latent
    for stranger in held:
        stranger.close()
    assert torch.equal(again, expected) and two_real_ranks.pids == pids
    assert torch.equal(two_real_ranks.sample(spec, flux_request(), TWO).latent, expected)
    assert not mark.exists()


def test_links_and_the_store_over_which_ranks_meet_have_no_name(two_real_ranks, served):
    for pid in two_real_ranks.pids:
        assert {one.laddr for one in psutil.Process(pid).net_connections("unix")} <= {"", None}
    assert os.fstat(two_real_ranks._ranks.group.store).st_nlink == 0
