"""Measurements in the form that the choice reads: medians, ageing, and only the runs that match a job."""

import dataclasses

import pytest

import fake_nvml
from jobs import flux_file, flux_job
from parallel_backend.machine.fingerprint import Fingerprint, cpu_name, take_fingerprint
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.candidates import enumerate_candidates
from parallel_backend.planner.records import (
    MAX_AGE_S,
    MAX_KINDS,
    MAX_LINKS,
    MAX_RUNS,
    LinkRate,
    Measurements,
    RunKind,
    keep_link,
    measured,
    record,
    warm_step,
)
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.strategy import ParallelStrategy

JOB = flux_job()
DEVICES = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
ULYSSES = ParallelStrategy(ulysses_degree=2)
NOW = 2_000_000_000.0
HERE = (DEVICES, NOW)


def kind(strategy=ULYSSES, of=JOB, **changes):
    return dataclasses.replace(RunKind.of(of, strategy, "native", DEVICES), **changes)


def known(*runs, now=NOW):
    """Returns the measurements after `runs`, each (kind, seconds)."""
    found = Measurements()
    for of, seconds in runs:
        found = record(found, of, seconds, now)
    return found


def test_the_median_of_a_kind_counts():
    found = known(*[(kind(), s) for s in (0.5, 9.0, 0.4)])
    assert measured(found, JOB, *HERE) == {ULYSSES: 0.5}


def test_of_each_group_of_devices_the_latest_link_is_kept():
    found = Measurements()
    for number in range(MAX_LINKS + 2):
        found = keep_link(found, LinkRate(f"{number}", 1e9, 1e-5, NOW))
    found = keep_link(found, LinkRate("5", 2e9, 1e-5, NOW))
    assert [link.devices for link in found.links] == [*map(str, range(2, 5)), *map(str, range(6, 22)), "5"]
    assert found.links[-1].bytes_per_second == 2e9
    assert record(found, kind(), 0.5, NOW).links == found.links


def test_only_the_latest_runs_are_kept():
    found = known(*[(kind(), 9.0)] * 30, *[(kind(), 1.0)] * MAX_RUNS)
    assert found.observed[0].seconds == (1.0,) * MAX_RUNS


def test_old_runs_are_ignored_and_forgotten():
    old = known((kind(), 9.0), now=NOW - MAX_AGE_S - 1)
    assert measured(old, JOB, *HERE) == {}
    both = record(old, kind(), 1.0, NOW)
    assert both.observed[0].seconds == (1.0,)
    other = record(old, kind(ParallelStrategy(ring_degree=2)), 1.0, NOW)
    assert len(other.observed) == 1


def test_a_time_from_the_future_is_no_measurement():
    ahead = known((kind(), 1.0), now=NOW + 10 * 86400)
    assert measured(ahead, JOB, *HERE) == {}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_duration_is_not_recorded(seconds):
    assert known((kind(), seconds)) == Measurements()


def test_the_oldest_kinds_are_forgotten_first():
    found = Measurements()
    for i in range(MAX_KINDS + 5):
        found = record(found, kind(model=str(i)), 1.0, NOW + i)
    assert len(found.observed) == MAX_KINDS
    assert {o.kind.model for o in found.observed} == {str(i) for i in range(5, MAX_KINDS + 5)}


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
    for unlisted in ({"device_shares": (2, 1)}, {"shard_weights": True, "offload_weights": True}):
        assert measured(known((kind(ULYSSES.replace(**unlisted)), 0.5)), JOB, *HERE) == {}


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


def test_a_fingerprint_changes_with_what_could_change_a_time_and_names_nobody(tmp_path):
    box = read_topology(fake_nvml.two_4090(), sys_root=tmp_path)
    base = take_fingerprint(box, {})
    assert base == take_fingerprint(box, {"USER": "someone", "HOME": "/home/someone"})
    assert not any(d.uuid in line for d in box.devices for line in base.hardware)
    others = [
        take_fingerprint(dataclasses.replace(box, driver="999.1"), {}),
        take_fingerprint(box.select([d.uuid for d in reversed(box.devices)]), {}),
        take_fingerprint(box, {"NCCL_P2P_DISABLE": "1"}),
        take_fingerprint(Topology(()), {}, cpu=("some processor",)),
    ]
    assert len({f.digest for f in [base, *others]}) == 5
    assert take_fingerprint(Topology(()), {}) == take_fingerprint(Topology(()), {})


def test_a_processor_without_a_name_is_called_by_its_kind(tmp_path):
    assert cpu_name(tmp_path / "nothing")
    assert Fingerprint(("a",), ("b",)).digest != Fingerprint(("a", "b"), ()).digest
