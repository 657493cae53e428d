"""The doctor's verdicts from injected faults: each check is a pure function of what was observed."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

import fake_nvml
from jobs import FP8, flux_job
from parallel_backend.commands.doctor.devices import check_devices, check_kernels
from parallel_backend.commands.doctor.links import check_links
from parallel_backend.commands.doctor.parity import Parity, check_parity, failed_start
from parallel_backend.commands.doctor.system import MIB, System, check_leftovers, check_system
from parallel_backend.commands.doctor.versions import BOUNDS, check_platform, check_versions, parse
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.planner.step_bounds import bytes_sent
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.calibration import (
    ALL_TO_ALL,
    PAIR,
    POINT_TO_POINT,
    SIZES,
    Calibration,
    RankFacts,
    Transfer,
)

GOOD = {bound.package: bound.least for bound in BOUNDS} | {"triton": "3.5.0", "nvidia-ml-py": "13.0"}
SYSTEM = System(
    cores=32,
    shm=16 * 1024 * MIB,
    shm_free=15 * 1024 * MIB,
    open_files=4096,
    locked_memory=-1,
    variables={},
)
FACTS = RankFacts("", (True, True), 0.0, "flash", "")


def named(findings, name):
    (found,) = [found for found in findings if found.name == name]
    return found


def not_ok(findings):
    return {found.name: found.status for found in findings if found.status != "ok"}


def versions(gpus=2, torch_problem="", **changes):
    changed = {name.replace("_", "-"): version for name, version in changes.items()}
    return list(check_versions({**GOOD, **changed}, gpus, torch_problem))


# Software.


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.5.1+cu124", "broken"),
        ("torch", "", "broken"),
        ("diffusers", "0.41.9", "broken"),
        ("diffusers", "", "broken"),
        ("safetensors", "0.4.1", "broken"),
        ("numpy", "1.24.4", "broken"),
        ("python", "3.9.18", "broken"),
        ("xfuser", "0.6.3", "slow"),
        ("xfuser", "", "skipped"),
    ],
)
def test_a_version_that_cannot_work_is_named_with_the_reason_and_the_remedy(package, version, status):
    found = named(versions(**{package: version}), package)
    bound = next(b for b in BOUNDS if b.package == package)
    assert found.status == status and bound.why in found.finding and found.remedy
    assert version in found.finding


def test_every_package_is_listed():
    assert [found.name for found in versions()] == [bound.package for bound in BOUNDS]


def test_bounds_agree_with_what_the_pack_asks_pip_for():
    asked = (Path(__file__).resolve().parents[3] / "requirements.txt").read_text()
    for bound in BOUNDS:
        assert bound.package == "python" or f"{bound.package}>={bound.least}" in asked


def test_release_numbers_are_read_from_any_spelling():
    assert parse("2.13.0a1+cu128") == (2, 13, 0) and parse("v0.7") == (0, 7) and parse("unknown") == ()


# System.


def system(ranks=2, on_gpus=True, **changes):
    return list(check_system(dataclasses.replace(SYSTEM, **changes), ranks, on_gpus))


# Devices.


def box(shape, *arguments):
    return read_topology(shape(*arguments), sys_root=Path("/nowhere"))


def changed(topology, *changes):
    """Returns the topology with one of `changes` applied to each device, in order."""
    devices = zip(topology.devices, changes, strict=True)
    return dataclasses.replace(topology, devices=tuple(dataclasses.replace(d, **c) for d, c in devices))


def devices(shape):
    return check_devices(box(shape), "some processor")


def exclusive_and_lost():
    nvml = fake_nvml.h100_nvswitch(3)
    nvml.boards[1].compute_mode = 3  # exclusive process
    nvml.boards[2].is_lost = True
    return nvml


def test_the_matrix_of_paths_has_a_row_per_gpu():
    paths = named(check_devices(box(fake_nvml.a6000_pairs), ""), "paths")
    assert len(paths.details) == 5
    assert paths.details[1].split() == ["GPU", "0", "·", "NVLINK", "56", "SYS", "32", "SYS", "32"]
    assert "across sockets" in paths.finding


# Links.


def calibrations(count=2, rate=20e9, backend="nccl", collective_s=30e-6, facts=FACTS):
    """Returns the thorough calibrations of `count` healthy ranks."""
    found = []
    for rank in range(count):
        kinds = [(ALL_TO_ALL, -1), (POINT_TO_POINT, -1)]
        kinds += [(PAIR, peer) for peer in range(count) if peer != rank]
        transfers = [Transfer(kind, size, size, size / rate, peer) for kind, peer in kinds for size in SIZES]
        own = dataclasses.replace(facts, peers=(True,) * count)
        strategy = ParallelStrategy(ring_degree=count)
        found.append(Calibration(rank, backend, strategy, tuple(transfers), collective_s, own))
    return found


def with_facts(ranks, rank, **changes):
    ranks = list(ranks)
    ranks[rank] = dataclasses.replace(ranks[rank], facts=dataclasses.replace(ranks[rank].facts, **changes))
    return ranks


def altered(ranks):
    """Returns the calibrations as if the last transfer that rank 1 received had been corrupted."""
    *most, last = ranks[1].transfers
    transfers = (*most, dataclasses.replace(last, intact=False))
    return [ranks[0], dataclasses.replace(ranks[1], transfers=transfers)]


TWO_A6000 = box(fake_nvml.a6000_pairs).select([f"GPU-{index:08x}" for index in (0, 1)])
NO_PEER = with_facts(calibrations(), 0, peers=(True, False))


def test_a_pair_far_below_its_nominal_rate_is_slow():
    found = named(check_links(calibrations(rate=5e9), TWO_A6000), "bandwidth")
    assert found.status == "slow" and "0–1" in found.finding
    assert len(found.details) == 3 and found.details[1].split() == ["GPU", "0", "·", "5.00"]


@pytest.mark.parametrize(("count", "rate"), [(2, 20e9), (2, 2e9), (8, 20e9)])
def test_from_which_step_on_devices_are_worth_it_is_said_by_the_links_alone(count, rate):
    sent = bytes_sent(flux_job(FP8), ParallelStrategy(ulysses_degree=count))  # the count that plans use
    exchange_s = sent / rate + 2 * 57 * 30e-6
    found = named(check_links(calibrations(count, rate), None), "worth an image")
    told = re.findall(r"[0-9.]+", found.finding.partition(": a step spends")[2])
    seconds, devices, even_s, times, good_s = map(float, told)
    assert (seconds, devices) == (pytest.approx(exchange_s, rel=0.05), count)
    for faster, one_s in ((1.0, even_s), (times, good_s)):
        assert one_s / (one_s / count + exchange_s) == pytest.approx(faster, rel=0.05)


def test_the_models_that_a_person_has_stand_in_place_of_published_ones():
    found = [
        v for v in check_links(calibrations(), None, models=[(40, 5120), (60, 3072)]) if "worth" in v.name
    ]
    assert [v.name for v in found] == ["worth an image"] * 2 + ["worth a video"] * 2
    assert all("your model of 60 blocks of width 3072: a step spends" in v.finding for v in found[1::2])
    published = named(check_links(calibrations(), None), "worth a video").finding
    assert published.partition(": ")[2] == found[2].finding.partition(": ")[2], "Wan 2.1 14B has these"


def test_what_links_gain_is_not_said_where_they_lie_between_machines():
    names = {v.name for v in check_links(calibrations(), None, across=True)}
    assert not names & {"worth an image", "worth a video"}


# Attention and the picture.


def test_missing_kernels_are_no_fault_but_a_hint():
    found = list(check_kernels(set(), [dataclasses.replace(FACTS, kernel="torch")], on_gpus=True))
    assert not_ok(found) == {} and "flash-attn" in named(found, "installed").remedy
    assert not named(check_kernels({"flash_attn"}, [FACTS], on_gpus=True), "installed").remedy
    assert not named(check_kernels(set(), [FACTS], on_gpus=False), "installed").remedy


@pytest.mark.parametrize(
    ("difference", "status"),
    [(2e-6, "ok"), (2e-4, "broken"), (1.0, "broken"), (math.inf, "broken"), (math.nan, "broken")],
)
def test_latents_that_differ_by_more_than_rounding_are_broken(difference, status):
    runs = [Parity("float32", "Ulysses 2", 1e-6), Parity("float32", "Ring 2", difference)]
    found, other = check_parity([*runs, Parity("bfloat16", "CFG 2", 0.01)])
    assert (found.status, other.status, bool(found.remedy)) == (status, "ok", status == "broken")
    assert f"Ring 2 against one device, float32: largest difference {difference:.1e}" in found.finding
    assert ("Ulysses 2" in found.finding) == (status == "ok")


# What is found, by name: nothing else is worth a word.

GLOO = calibrations(backend="gloo", collective_s=1e-3)
UNTIMED = [dataclasses.replace(c, transfers=()) for c in calibrations()]
FOUND = {
    "a good installation": (versions(), {}),
    "xfuser without triton": (versions(triton=""), {"xfuser + triton": "slow"}),
    "a torch for the CPU beside GPUs": (versions(torch="2.13.0+cpu"), {"torch build": "broken"}),
    "no nvidia-ml-py": (versions(nvidia_ml_py=""), {"nvidia-ml-py": "slow"}),
    "without GPUs": (versions(gpus=0, torch="2.13.0+cpu", triton="", nvidia_ml_py=""), {}),
    "GPUs of AMD": (versions(torch="2.9.0+rocm6.4", nvidia_ml_py=""), {}),
    "Linux": ([check_platform("linux", "6.8.0")], {}),
    "WSL2": ([check_platform("linux", "5.15.1-microsoft-standard-WSL2")], {"system": "slow"}),
    "Windows": ([check_platform("win32", "")], {"system": "broken"}),
    "a good system": (system(), {}),
    "little shared memory": (system(shm=64 * MIB, shm_free=64 * MIB), {"/dev/shm": "broken"}),
    "not much shared memory": (system(shm=256 * MIB, shm_free=256 * MIB), {"/dev/shm": "slow"}),
    "full shared memory": (system(shm=1024 * MIB, shm_free=MIB), {"/dev/shm": "broken"}),
    "no shared memory": (system(shm=None), {"/dev/shm": "broken"}),
    "few open files": (system(open_files=128), {"open files": "broken"}),
    "not many open files": (system(open_files=512), {"open files": "slow"}),
    "few cores": (system(cores=3), {"CPU cores": "slow"}),
    "no P2P by hand": (system(variables={"NCCL_P2P_DISABLE": "1"}), {"environment": "slow"}),
    "debugging": (system(variables={"TORCH_DISTRIBUTED_DEBUG": "detail"}), {"environment": "slow"}),
    "a small computer without GPUs": (system(on_gpus=False, shm=MIB, shm_free=MIB, cores=1), {}),
    "no limit of open files": (system(open_files=-1, variables={"NCCL_P2P_DISABLE": "0"}), {}),
    "h100_nvswitch": (devices(fake_nvml.h100_nvswitch), {}),
    "two_4090": (devices(fake_nvml.two_4090), {"paths": "slow"}),
    "a6000_pairs": (devices(fake_nvml.a6000_pairs), {"paths": "slow"}),
    "l40_two_sockets": (devices(fake_nvml.l40_two_sockets), {"paths": "slow"}),
    "mixed_4080_4090": (devices(fake_nvml.mixed_4080_4090), {"together": "slow", "paths": "slow"}),
    "mig": (devices(fake_nvml.mig), {"NVML": "slow", "MIG": "broken", "paths": "slow"}),
    "exclusive and lost": (devices(exclusive_and_lost), {"NVML": "slow", "GPU 1": "broken"}),
    "no GPU": (check_devices(Topology(()), "some processor"), {"GPUs": "skipped"}),
    "good links": (check_links(calibrations(), TWO_A6000), {}),
    "good links on the CPU": (check_links(GLOO, None), {}),
    "links that could not be timed": (
        check_links(UNTIMED, None),
        dict.fromkeys(("bandwidth", "all at once", "worth an image", "worth a video"), "skipped"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_wrong_and_nothing_else_is_named_with_its_remedy(name):
    findings, expected = FOUND[name]
    findings = list(findings)
    assert not_ok(findings) == expected
    wrong = [found for found in findings if found.status in ("slow", "broken")]
    assert {found.name for found in wrong if not found.remedy} <= {"NVML"}


# Every finding has words, and a remedy if there is one.

KERNEL = dataclasses.replace(FACTS, kernel_problem="ImportError: undefined symbol")
OLD_AND_SMALL = changed(box(fake_nvml.h100_nvswitch, 2), {"capability": (7, 5)}, {"memory": 8 * 10**9})
WORDS = [
    (versions(torch_problem="OSError: libcudart"), "torch import", "broken", "libcudart", "install torch"),
    (versions(diffusers="0.50.0"), "diffusers", "ok", "tested with 0.42", ""),
    (check_devices(Topology(()), "some processor"), "CPU", "ok", "some processor", ""),
    ([check_leftovers([])], "leftovers", "ok", "none", ""),
    ([check_leftovers([41, 42])], "leftovers", "broken", "2 worker processes", "kill 41 42"),
    (check_devices(OLD_AND_SMALL, ""), "GPU 0", "slow", "no bfloat16", "float16"),
    (check_devices(OLD_AND_SMALL, ""), "GPU 1", "slow", "does not fit", "shard the weights"),
    (check_devices(box(exclusive_and_lost), ""), "GPU 1", "broken", "several", "nvidia-smi -c DEFAULT"),
    (check_devices(box(exclusive_and_lost), ""), "NVML", "slow", "GPU 2 does not answer", ""),
    (
        check_links(with_facts(calibrations(), 1, all_reduce_error=3.0), None),
        *("all-reduce", "broken", "process 1 is off by 3", "IOMMU"),
    ),
    (
        check_links(altered(calibrations()), None),
        *("data", "broken", "between processes 0 and 1", "NCCL_P2P_DISABLE=1"),
    ),
    (check_links(NO_PEER, TWO_A6000), "peer access", "slow", "NVML promises it for 1", "BIOS"),
    (check_links(NO_PEER, box(fake_nvml.two_4090)), "peer access", "slow", "have none", "GeForce"),
    (check_links(with_facts(NO_PEER, 0, device_uuid="1"), None), "peer access", "slow", "have none", ""),
    (check_links(calibrations(collective_s=1e-3), None), "latency", "slow", "1000 us", "CPU is busy"),
    (
        check_kernels({"flash_attn"}, [FACTS, KERNEL], on_gpus=True),
        *("in use", "broken", "undefined symbol", "attention: torch"),
    ),
    (check_kernels(set(), [], on_gpus=True), "in use", "skipped", "no process", ""),
    ([failed_start(2, "process 1 failed: exited")], "processes", "broken", "process 1 failed", "last lines"),
]


@pytest.mark.parametrize(("findings", "name", "status", "words", "remedy"), WORDS)
def test_what_is_found_is_said_with_its_remedy(findings, name, status, words, remedy):
    found = named(findings, name)
    assert found.status == status and words in found.finding and remedy in found.remedy
