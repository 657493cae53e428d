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
from parallel_backend.wire.protocol import Done, Envelope, RunJob, TakeBack
from parallel_backend.wire.transport import close_all, link_pair, pack_tensors, unpack_tensors
from waiting import wait_until

WAIT = 30.0


@contextmanager
def relayed(folder, ranks):
    """Yields {rank: (head's link, rank's link)}, joined by two relays, and these relays, which end with the block."""
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
    pairs = {}
    for rank in range(ranks):
        (head_end, inner), (outer, rank_end) = link_pair(), link_pair()
        relays[0].links[rank], relays[1].links[rank] = inner, outer
        pairs[rank] = head_end, rank_end
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    yield pairs, relays
    for pair in pairs.values():
        for link in pair:
            link.close()

    def end():
        raise endpoints.TransportError("the test ends")

    relays[0].submit(end)
    for thread in threads:
        thread.join()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path))
    return tmp_path


def tensors(size=1000):
    return {"latent": torch.randn(3, size), "ids": torch.arange(5), "mask": torch.tensor([True, False])}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_messages_and_sealed_payloads_arrive_as_they_were_sent(folder, no_leaks):
    with relayed(folder, 2) as (pairs, relays):
        sent = Envelope(3, 4, RunJob(None, 0, model=7))
        big = tensors(3_000_000)  # 36 MB: many turns of both loops
        payload = pack_tensors(big)
        for rank in (0, 1):  # the same payload to both ranks: it is sent once
            pairs[rank][0].send(sent, (payload,), WAIT)
        os.close(payload)
        for rank in (0, 1):
            envelope, descriptors = pairs[rank][1].receive(WAIT)
            assert envelope == sent
            assert_same(unpack_tensors(*descriptors), big)
            close_all(descriptors)
        wait_until(lambda: not relays[0].channel._outgoing, WAIT)  # no sign of life is queued
        pairs[0][0].send(Envelope(3, 5, TakeBack()))
        assert pairs[0][1].receive(WAIT) == (Envelope(3, 5, TakeBack()), ())
        answer = pack_tensors(tensors())
        expected = unpack_tensors(answer)
        pairs[1][1].send(Envelope(3, 5, Done()), (answer,))
        os.close(answer)
        envelope, descriptors = pairs[1][0].receive(WAIT)
        assert envelope == Envelope(3, 5, Done())
        assert_same(unpack_tensors(*descriptors), expected)
        close_all(descriptors)
