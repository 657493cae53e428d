"""Verdicts of the load, soak and fault tests: whether a latent is its seed's, what grew, and limits in seconds."""

import os
import socket
from functools import partial

import pytest
import torch
from adversaries.descriptors import added, kinds_of
from adversaries.soak import MIB, Usage, growth
from fault_cases.case import Check
from load_test.mix import ALL, MODELS, graph_of, orders
from load_test.programs import EXACT, differs
from load_test.readings import grown_mib, leaks


def test_a_latent_is_its_seed_s_up_to_rounding_and_no_other():
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    nearly = latent + latent.abs().max() * EXACT / 2
    assert not differs(nearly, latent)
    assert differs(latent + latent.abs().max() * EXACT * 2, latent)
    assert differs(latent[..., :4], latent) and differs(torch.full_like(latent, float("nan")), latent)


def usages(memory=lambda n: 400.0, descriptors=lambda n: 30, threads=lambda n: 9, rounds=9):
    return [Usage(int(memory(n) * MIB), descriptors(n), threads(n)) for n in range(rounds)]


def test_what_grows_over_the_prompts_is_seen_and_what_levels_off_is_not():
    long = partial(usages, rounds=30)
    level = {
        "ComfyUI a": long(lambda n: 400 + min(n, 8)),
        "rank 0 of a": long(lambda n: 90, threads=lambda n: n),
    }
    assert grown_mib(level) == 0 and leaks(level) == []
    grown = {
        **level,
        "rank 1 of a": long(lambda n: 90 + n),
        "ComfyUI b": long(lambda n: 90, lambda n: 30 + n),
    }
    assert grown_mib(grown) == pytest.approx(10)
    assert [words.partition(":")[0] for words in leaks(grown)] == ["rank 1 of a", "ComfyUI b"]
    assert grown_mib({}) == grown_mib({"a": long(lambda n: n)[:2]}) == 0


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (usages(), []),
        (usages(memory=lambda n: 200.0 + 200.0 * min(n, 2)), []),  # warms up
        (usages(memory=lambda n: 400.0 + 30.0 * (n % 3), descriptors=lambda n: 30 + n % 2), []),  # wanders
        (usages(rounds=6), []),
        (usages(memory=lambda n: 400.0 + 4.0 * n), ["memory 416.0 -> 428.0 MiB in 3 rounds"]),
        (usages(descriptors=lambda n: 30 + n // 3), ["descriptors 31 -> 32 in 3 rounds"]),
        (usages(threads=lambda n: 9 + n), ["threads 13 -> 16 in 3 rounds"]),
    ],
)
def test_what_grows_with_the_rounds_of_the_soak_test_is_told_and_what_levels_off_is_not(seen, words):
    assert list(growth(seen)) == words


def test_what_is_open_is_told_by_kind(tmp_path):
    before = kinds_of(os.getpid())
    with (tmp_path / "log").open("w"), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        with listener.accept()[0] as taken:
            words, usage = added(before, kinds_of(os.getpid())), Usage.of(os.getpid())
            client.close()
            assert taken.recv(1) == b""
            left = added(before, kinds_of(os.getpid()))
    files = f"1 x {tmp_path}/log, 1 x TCP connection that its client"
    assert words == f"{files} keeps open, 1 x TCP connection to port {port}, 1 x TCP port {port}"
    assert usage.descriptors == usage.kinds.total() - 1
    assert left == f"{files} has closed, 1 x TCP port {port}"  # a forgotten connection looks the same
    assert added(before, kinds_of(os.getpid())) == ""


def test_the_mix_has_every_model_and_size_and_cancels_and_is_the_same_each_time():
    mixed = orders(1000, alternate=False)
    assert mixed == orders(1000, alternate=False)
    assert {order.picture for order in mixed} == set(ALL)
    assert 20 < sum(order.cancelled for order in mixed) < 100
    turns = orders(10, alternate=True)
    assert [order.picture.model for order in turns] == [*MODELS[1:]] * 5 and not any(
        o.cancelled for o in turns
    )
    first, second = (graph_of(mixed[0].picture, number, ranks=2) for number in (1, 2))
    assert first != second  # else ComfyUI would answer from its cache


@pytest.mark.parametrize(
    ("check", "slowness", "passes"),
    [
        (Check("noticed", 0.9, 0.5, timed=True), 1.0, False),
        (Check("noticed", 0.9, 0.5, timed=True), 2.0, True),
        (Check("processes left", 1, 0), 9.0, False),
        (Check("ready", 99.0), 1.0, True),  # without a limit: only measured
    ],
)
def test_a_limit_in_seconds_holds_times_how_slow_the_machine_was(check, slowness, passes):
    assert check.passes(slowness) is passes
