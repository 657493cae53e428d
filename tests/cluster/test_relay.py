"""Relays between two local links over an encrypted connection: what goes in at one end comes out at the other."""

import os
import socket
import threading
from contextlib import contextmanager

import pytest
import torch

from cluster_machines import make_cluster
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.cluster.channel import DATAGRAMS, Channel, Kind
from parallel_backend.cluster.relay import Relay
from parallel_backend.cluster.tls import make_context, secure
from parallel_backend.wire.protocol import Envelope, RunJob
from parallel_backend.wire.transport import close_all, link_pair, pack_tensors, unpack_tensors

WAIT = 30.0


@contextmanager
def relayed(folder, ranks):
    """Yields (head's link, rank's link) of each rank, joined by two relays, which end with the block."""
    secret = make_cluster(folder)
    head = endpoints.find_head("lab")
    machine = endpoints.read_endpoint(secret, endpoints.MACHINE)
    ours, theirs = socket.socketpair()
    ends = []
    other = threading.Thread(target=lambda: ends.append(secure(theirs, machine, make_context(machine), WAIT)))
    other.start()
    ends.insert(0, secure(ours, head, make_context(head), WAIT))
    other.join()
    accepts = DATAGRAMS | {Kind.BEAT, Kind.LEFT}
    relays = [
        Relay(Channel(end, accepts), lambda frame: None, lambda rank: None, lambda: b"") for end in ends
    ]
    pairs = []
    for rank in range(ranks):
        (head_end, inner), (outer, rank_end) = link_pair(), link_pair()
        relays[0].links[rank], relays[1].links[rank] = inner, outer
        pairs.append((head_end, rank_end))
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()

    def end():
        raise endpoints.TransportError("the test ends")

    try:
        yield pairs
    finally:
        relays[0].submit(end)
        for thread in threads:
            thread.join()
        for pair in pairs:
            for link in pair:
                link.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path))
    return tmp_path


def test_a_large_payload_for_two_ranks_arrives_as_it_was_sent(folder, no_leaks):
    """tests/rank/joined/test_join.py sends all other messages both ways."""
    with relayed(folder, 2) as pairs:
        sent, big = Envelope(3, 4, RunJob(None, 0, model=7)), torch.randn(9_000_000)
        payload = pack_tensors({"latent": big})  # 36 MB: many turns of both loops
        for head_end, _ in pairs:  # the same payload to both ranks: it is sent once
            head_end.send(sent, (payload,), WAIT)
        os.close(payload)
        for _, rank_end in pairs:
            envelope, descriptors = rank_end.receive(WAIT)
            assert envelope == sent
            assert torch.equal(unpack_tensors(*descriptors)["latent"], big)
            close_all(descriptors)
