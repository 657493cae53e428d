"""Ranks started by real torchruns on two machines (here two loopback addresses) with two devices each work like local
ranks."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster_machines import ForkedTorchrun, make_cluster
from comfyui_server import free_port
from flux_requests import request
from oracle import oracle_model, oracle_sample
from parallel_backend import devices
from parallel_backend.__main__ import main
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.commands.doctor import rank_probe
from parallel_backend.errors import CheckpointError, PlatformError
from parallel_backend.rank.joined import join as rank_join
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import deadlines
from tiny_flux import write_tiny_flux
from waiting import wait_until

pytestmark = [pytest.mark.xdist_group("torchrun"), pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENCE = 240.0  # s for torchrun and an import of torch in each rank, on a machine that is busy

JOB = request((10, 14), 4.0, 1, steps=4)
CFG = Placement(ParallelStrategy(cfg_degree=2, ulysses_degree=2))  # one prompt per machine, split by tokens


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Yields (sidecar over the machines a and b, the head's model, the machines by name)."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(endpoints.VARIABLE, str(folder / "secrets"))
        patch.setattr(devices, "_clusters", None)
        patch.setattr(deadlines, "MACHINES", PATIENCE)
        secret = make_cluster(folder / "secrets")
        clusters.serve_known()
        head = clusters.open_head("lab")
        model = write_tiny_flux(folder / "head" / "diffusion_models" / "tiny.safetensors")
        meeting = f"127.0.0.1:{free_port()}"
        machines = {}
        for name, address in (("a", "127.0.0.2"), ("b", "127.0.0.3")):
            own = folder / name / "unet" / "tiny.safetensors"  # in a folder of another name
            own.parent.mkdir(parents=True)
            shutil.copy(model, own)
            machines[name] = ForkedTorchrun(
                name,
                secret,
                f"127.0.0.1:{head.port}",
                meeting,
                models=own.parent,
                local=address,
                ranks=2,
                log=folder / f"{name}.log",
            )
        try:
            wait_until(lambda: len(head.devices()) == 4, PATIENCE)
            sidecar = Sidecar(devices.resolve_devices("cluster:lab"))
            yield sidecar, ModelSpec(str(model)), machines
            sidecar.stop()
        finally:
            clusters.close_all()
            for machine in machines.values():
                machine.stop()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Returns diffusers' model, in this process."""
    return oracle_model(tmp_path_factory.mktemp("oracle"))


def is_equal(found, expected):
    return (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "strategy",
    [
        CFG.strategy,
        ParallelStrategy(ring_degree=2, ulysses_degree=2),  # only chosen by hand: the ring crosses machines
    ],
    ids=lambda strategy: strategy.describe(),
)
def test_two_machines_give_the_latent_of_one_process(strategy, lab, one_process):
    sidecar, spec, _ = lab
    steps = []
    result = sidecar.sample(spec, JOB, Placement(strategy), lambda *step: steps.append(step))
    expected = oracle_sample(one_process, JOB)
    assert is_equal(result.latent, expected)
    assert not is_equal(oracle_sample(one_process, replace(JOB, cfg=4.01)), expected)  # negative control
    assert [step for step, _, _ in steps] == [1, 2, 3, 4]
    assert is_equal(steps[-1][2], expected)  # the preview travels too
    assert result.info.strategy == strategy and min(result.info.bytes_sent) > 0


def test_a_rank_that_joins_has_a_queue_for_each_communicator(monkeypatch):
    monkeypatch.setattr(rank_join, "die_with_parent", lambda parent: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(PlatformError, match="joins a cluster when torchrun starts it"):
        rank_join.join(["--join", "head", "--secret-file", "none"])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_a_file_that_a_machine_lacks_is_named_with_the_machine_and_costs_nothing(lab, tmp_path):
    sidecar, spec, _ = lab
    epoch, folder = sidecar._ranks.group.epoch, Path(spec.path).parents[2]
    other = write_tiny_flux(tmp_path / "other.safetensors", seed=1)
    shutil.copy(other, folder / "a" / "unet")
    with pytest.raises(CheckpointError, match=r"Machine b has no other\.safetensors \(searched .*/b/unet\)"):
        sidecar.load(ModelSpec(str(other)))
    write_tiny_flux(folder / "b" / "unet" / "other.safetensors", seed=2)  # of the same size and header
    with pytest.raises(
        CheckpointError, match=r"Machine b has another file under the name other\.safetensors"
    ):
        sidecar.load(ModelSpec(str(other)))
    shutil.copy(other, folder / "b" / "unet")
    assert sidecar.load(ModelSpec(str(other))).model == "other.safetensors"
    assert sidecar.load(spec, ParallelStrategy()).model == "tiny.safetensors"
    assert sidecar._ranks.group.epoch == epoch


def test_a_cancelled_job_leaves_the_machines_warm(lab, one_process):
    sidecar, spec, _ = lab
    epoch = sidecar._ranks.group.epoch

    class Enough(Exception):
        pass

    def on_step(step, *_):
        raise Enough

    with pytest.raises(Enough):
        sidecar.sample(spec, replace(JOB, sigmas=torch.linspace(1, 0, 41)), CFG, on_step)
    assert is_equal(sidecar.sample(spec, JOB, CFG).latent, oracle_sample(one_process, JOB))
    assert sidecar._ranks.group.epoch == epoch


def test_torchrun_brings_a_killed_rank_back_and_the_job_is_made_again(lab, one_process):
    sidecar, spec, machines = lab
    job, seen = replace(JOB, sigmas=torch.linspace(0.95, 0, 41)), []  # long: progress arrives with a delay

    def on_step(step, *_):
        seen.append(step)
        if step == 5 and seen.count(5) == 1:
            for pid in machines["b"].ranks():
                os.kill(pid, signal.SIGKILL)

    result = sidecar.sample(spec, job, CFG, on_step)
    assert is_equal(result.latent, oracle_sample(one_process, job))
    (note,) = [note for note in result.info.notes if "begins again" in note]
    assert "@lab/b" in note and "left the cluster" in note
    assert seen.count(1) == 2 and seen[-1] == 40


def test_the_doctor_examines_machines_and_the_network_between_them(lab, capsys, monkeypatch):
    """Must be the last test of this file: it stops the sidecar, because machines serve one group at a time."""
    sidecar, _, _ = lab
    sidecar.stop()
    monkeypatch.setattr(rank_probe, "LINKS_S", 1.0)
    status = main(["doctor", "--devices", "cpu:0@lab/a,cpu:0@lab/b", "--json"])
    printed = capsys.readouterr()
    found = {verdict["name"]: verdict for verdict in json.loads(printed.out)["verdicts"]}
    assert status == 0, printed.out
    assert found["machine 1"]["finding"] == "1 on the CPU" and found["all-reduce"]["status"] == "ok"
    assert "Ulysses 2, Ring 2, CFG 2 against one device" in found["same latent"]["finding"]
    assert printed.err == "machine 1: lab/a\nmachine 2: lab/b\n" and "lab/" not in printed.out
