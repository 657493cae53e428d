"""A head and three hosts over a slow network that loses packets, with real torchrun and gloo."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster_machines import ForkedTorchrun, make_cluster
from flux_requests import request
from oracle import oracle_model, oracle_sample
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.sidecar.group.supervisor import PACK_ROOT
from slow_network import FIRST, Hosts
from tiny_flux import write_tiny_flux
from waiting import wait_until

pytestmark = [pytest.mark.xdist_group("torchrun"), pytest.mark.slow, pytest.mark.timeout(1200)]

NAMES = ("a", "b", "c")
JOB = request((10, 14), 1.0, 3, steps=12)  # equal to the job in the head's program


class Head:
    """The head's program, which runs on its own host."""

    def __init__(self, hosts, folder):
        support = PACK_ROOT / "tests" / "support"
        path = os.pathsep.join((str(PACK_ROOT), str(support)))
        self.process = subprocess.Popen(
            [*hosts.within(FIRST), sys.executable, str(support / "rank_programs" / "cluster_head.py")],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "head.log").open("wb"),
            text=True,
        )

    def tell(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def until(self, field):
        """Returns the next answer that has this field."""
        for line in self.process.stdout:
            answer = json.loads(line)
            if field in answer:
                return answer
            assert "error" not in answer, answer
        raise AssertionError("the head ended")

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def hosts():
    made = Hosts(*NAMES)
    try:
        yield made
        wait_until(lambda: not made.processes())
    finally:
        made.remove()
    assert made.network.lost > 0, "no packet was lost, so the test says little of networks"


@pytest.fixture(scope="module")
def lab(hosts, tmp_path_factory):
    """Yields (head, start(name), {name: running machine}, path of the model, path for the latent)."""
    folder, machines = tmp_path_factory.mktemp("hosts"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(endpoints.VARIABLE, str(folder / "secrets"))
        secret = make_cluster(folder / "secrets", address=hosts.address(FIRST), port=29600)
        head = Head(hosts, folder)
    model = write_tiny_flux(folder / "models" / "tiny.safetensors")
    port = head.until("port")["port"]

    def start(name):
        own = folder / name
        own.mkdir(exist_ok=True)
        shutil.copy(model, own)
        machines[name] = ForkedTorchrun(
            name,
            secret,
            f"{hosts.address(FIRST)}:{port}",
            f"{hosts.address('a')}:29400",
            models=own,
            local=hosts.address(name),
            nodes="2:3",
            log=folder / f"{name}.log",
            namespace=hosts.namespace(name),
            settings=f"is_host={int(name == 'a')},last_call_timeout=2,keep_alive_interval=1",
        )

    for name in NAMES:
        start(name)
    yield head, start, machines, str(model), folder / "latent.pt"
    for machine in machines.values():
        machine.stop()
    head.close()


def test_a_host_cut_off_in_mid_job_is_named_left_out_and_taken_back(lab, hosts, tmp_path):
    head, start, machines, model, latent = lab
    expected = oracle_sample(oracle_model(tmp_path / "oracle"), JOB)

    def check():
        found = torch.load(latent, weights_only=True)
        Path(latent).unlink()
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    # `auto` gives each host whole images of the batch, so no tokens cross the network.
    head.tell("wait for", 3)
    everyone = head.until("devices")["devices"]
    assert everyone == [f"cpu:0@lab/{name}" for name in NAMES]
    head.tell("sample", model, str(latent))
    assert head.until("devices")["devices"] == everyone
    assert head.until("done")["done"] == []
    check()

    # A host is cut off in mid-job, so no connection is reset. The job waits for the host, and then names it.
    head.tell("patience", 3.0)
    head.tell("sample", model, str(latent))
    head.until("step")
    hosts.cut_off("c")
    error = head.until("error")["error"]
    assert error.startswith("DeviceError: Machine c of the cluster lab is not there (no word for 10 s")
    machines["c"].stop()  # its torchrun has lost its rendezvous as well

    head.tell("patience", 240.0)
    head.tell("sample", model, str(latent))
    plan = head.until("strategy")
    assert plan["devices"] == everyone[:2]
    assert any("machine lab/c left out until it is back: no word for 10 s" in note for note in plan["notes"])
    head.until("done")
    check()

    hosts.join("c")
    start("c")
    head.tell("wait for", 3)
    assert head.until("devices")["devices"] == everyone
    head.tell("sample", model, str(latent))
    assert head.until("strategy")["devices"] == everyone
    head.until("done")
    check()


def test_the_host_whose_processes_are_killed_is_named_not_the_one_that_hosts_the_rendezvous(lab):
    """Must be the last test with these hosts, because it kills the processes of one."""
    head, _, machines, model, latent = lab
    head.tell("wait for", 3)
    assert len(head.until("devices")["devices"]) == 3
    head.tell("patience", 3.0)
    head.tell("sample", model, str(latent))
    head.until("step")
    processes = [machines["b"].process.pid, *machines["b"].ranks()]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    error = head.until("error")["error"]
    assert error.startswith("DeviceError: Machine b of the cluster lab is not there ("), error
