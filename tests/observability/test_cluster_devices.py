"""Cluster devices for a command: the command is the head, waits for machines, and says what is missing."""

import re

import pytest

from cluster_machines import BareMachine, make_cluster
from parallel_backend import devices
from parallel_backend.__main__ import main
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.errors import DeviceError
from parallel_backend.observability.cluster_devices import resolve_for_command
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.wire import deadlines


@pytest.fixture
def secret(tmp_path, monkeypatch, no_leaks):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path))
    monkeypatch.setattr(devices, "_clusters", None)
    yield make_cluster(tmp_path)
    clusters.close_all()


def joined(secret, **join):
    """Returns (printed lines, machines, `say`). The machines join when the command calls `say`, as it listens then."""
    said, machines = [], []

    def say(text):
        said.append(text)
        machines.extend(BareMachine(clusters.open_head("lab"), secret, machine=name, **join) for name in "ba")

    return said, machines, say


def test_the_machines_that_join_until_nobody_else_does(secret, monkeypatch):
    monkeypatch.setattr(deadlines, "GATHER", 1.0)
    said, machines, say = joined(secret)
    assert resolve_for_command(" cluster:LAB ", say) == ("cpu:0@lab/a", "cpu:0@lab/b")
    (line,) = said
    assert re.fullmatch(r"waiting on port \d+ for the machines of the cluster lab", line)
    for machine in machines:
        machine.close()


def test_devices_by_name_are_waited_for_and_no_others(secret, monkeypatch):
    monkeypatch.setattr(deadlines, "GATHER", 600.0)
    _, machines, say = joined(secret)
    assert resolve_for_command("cpu:0@lab/b, cpu:0@lab/a", say) == ("cpu:0@lab/b", "cpu:0@lab/a")
    for machine in machines:
        machine.close()


def test_own_devices_need_no_head():
    assert resolve_for_command("cpu:2", pytest.fail) == ("cpu:0", "cpu:1")


def test_what_is_not_there_is_named_with_its_remedy(secret, monkeypatch):
    monkeypatch.setattr(deadlines, "MACHINES", 0.1)
    with pytest.raises(DeviceError, match=r"no machine has joined it yet\. Start torchrun"):
        resolve_for_command("cluster:lab", lambda text: None)
    with pytest.raises(DeviceError, match=r"no cluster of that name \(known: lab\)"):
        resolve_for_command("cluster:other", lambda text: None)
    with pytest.raises(DeviceError, match=r"'' is no name of a cluster; .*such as cluster:lab"):
        resolve_for_command("cluster:", lambda text: None)


@pytest.mark.parametrize("text", ["cluster:lab", "cuda:0@lab/a"])
def test_the_gpu_check_is_for_one_computer(text, capsys):
    assert main(["doctor", "--gpu", "--devices", text]) == 2
    assert "Run it on each machine, and `doctor --devices cluster:lab`" in capsys.readouterr().err
