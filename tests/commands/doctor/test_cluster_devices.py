"""Cluster devices for a command: the command is the head, waits for machines, and says what is missing."""

import re

import pytest

from cluster_machines import BareMachine, make_cluster
from parallel_backend import devices
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.commands.doctor import devices as for_command
from parallel_backend.errors import DeviceError
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.wire import deadlines


@pytest.fixture
def secret(tmp_path, monkeypatch, no_leaks):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path))
    monkeypatch.setattr(devices, "_clusters", None)
    yield make_cluster(tmp_path)
    clusters.close_all()


@pytest.mark.parametrize(
    ("text", "gather", "order"),
    [(" cluster:LAB ", 0.2, "ab"), ("cpu:0@lab/b, cpu:0@lab/a", 600.0, "ba")],
    ids=["all until nobody else joins", "those that are named and no others"],
)
def test_machines_are_waited_for(secret, monkeypatch, text, gather, order):
    """They join when the command says that it waits, as it listens then."""
    monkeypatch.setattr(deadlines, "GATHER", gather)
    machines = []

    def say(line):
        assert re.fullmatch(r"waiting on port \d+ for the machines of the cluster lab", line)
        machines.extend(BareMachine(clusters.open_head("lab"), secret, machine=name) for name in "ba")

    monkeypatch.setattr(for_command, "say_progress", say)
    assert for_command.resolve_for_command(text) == tuple(f"cpu:0@lab/{name}" for name in order)
    for machine in machines:
        machine.close()


def test_what_is_not_there_is_named_with_its_remedy(secret, monkeypatch):
    monkeypatch.setattr(deadlines, "MACHINES", 0.1)
    with pytest.raises(DeviceError, match=r"no machine has joined it yet\. Start torchrun"):
        for_command.resolve_for_command("cluster:lab")
    with pytest.raises(DeviceError, match=r"no cluster of that name \(known: lab\)"):
        for_command.resolve_for_command("cluster:other")
    with pytest.raises(DeviceError, match=r"'' is no name of a cluster; .*such as cluster:lab"):
        for_command.resolve_for_command("cluster:")
