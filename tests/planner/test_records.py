"""Measurements are stored under the strategy, the model and the fingerprint of a machine."""

import dataclasses

import fake_nvml
from jobs import flux_file, flux_job
from parallel_backend.machine import fingerprint
from parallel_backend.machine.fingerprint import Fingerprint, cpu_name, take_fingerprint
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.candidates import enumerate_candidates
from parallel_backend.planner.history import warm_step
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.strategy import ParallelStrategy


def test_warm_up_does_not_count():
    assert warm_step((9.0, 1.0, 2.0, 3.0)) == 2.0
    assert warm_step((9.0,)) is None and warm_step(()) is None


def test_candidates_are_spelt_as_the_choice_spells_them():
    listed = set(enumerate_candidates(flux_job(prompts=2, batch=2), 4))
    assert all(strategy.canonical == strategy for strategy in listed)
    assert ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=2).canonical in listed
    assert ParallelStrategy(ulysses_degree=2, warmup_steps=4).canonical in listed
    patched = ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=4)
    assert patched.canonical == patched


def test_a_model_is_its_sizes_and_how_it_is_computed():
    def key(dims=FLUX_DEV, tensor_bytes=10, weight_dtype="bfloat16", options=None, path="a"):
        return CheckpointModel(
            flux_file(tensor_bytes, dims, path), weight_dtype, options or ComputeOptions()
        ).key

    assert key() == key(dataclasses.replace(FLUX_DEV), path="b")
    others = [
        key(dataclasses.replace(FLUX_DEV, single_blocks=37)),
        key(tensor_bytes=11),
        key(weight_dtype="float32"),
        key(options=ComputeOptions("blocks")),
    ]
    assert len({*others, key()}) == 5


def test_a_fingerprint_changes_with_what_could_change_a_time_and_names_nobody(tmp_path, monkeypatch):
    box = read_topology(fake_nvml.two_4090(), sys_root=tmp_path)
    base = take_fingerprint(box)
    monkeypatch.setenv("USER", "someone")
    assert base == take_fingerprint(box)
    assert not any(d.uuid in line for d in box.devices for line in base.hardware)
    others = [
        take_fingerprint(dataclasses.replace(box, driver="999.1")),
        take_fingerprint(box.select([d.uuid for d in reversed(box.devices)])),
        take_fingerprint(Topology(())),
    ]
    assert others[-1] == take_fingerprint(Topology(()))
    monkeypatch.setattr(fingerprint, "cpu_name", lambda: "some processor")
    others.append(take_fingerprint(Topology(())))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    others.append(take_fingerprint(box))
    assert len({f.digest for f in [base, *others]}) == 6


def test_a_processor_without_a_name_is_called_by_its_kind(tmp_path):
    assert cpu_name(tmp_path / "nothing")
    assert Fingerprint(("a",), ("b",)).digest != Fingerprint(("a", "b"), ()).digest
