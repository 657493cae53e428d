"""The checks of the GPU check that use ranks: they pass on real CPU ranks, and they find what is wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fake_nvml
from parallel_backend.commands.doctor import rank_probe
from parallel_backend.commands.gpu_check import one_device as one_gpu
from parallel_backend.commands.gpu_check import ranks
from parallel_backend.commands.gpu_check import several_devices as several_gpus
from parallel_backend.commands.gpu_check.run import choose, make_subject
from parallel_backend.errors import ParallelError
from parallel_backend.machine.probe import read_topology
from parallel_backend.options import COMPILE_BACKEND
from parallel_backend.requests import LoadInfo, RunInfo, SampleResult
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import deadlines

pytestmark = pytest.mark.xdist_group("gpu_checks")  # all tests share the groups of ranks
TINY = replace(make_subject(("cpu:0", "cpu:1")), pixels=64, odd_pixels=(56, 72), text=8, steps=2)
CHECKS = {check.name: check for _, check in choose(())}


@pytest.fixture(scope="module")
def two():
    """The ranks for all tests of this file: a group of one and a group of two, each started on first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMPILE_BACKEND, "eager")
        patch.setattr(rank_probe, "LINKS_S", 1.0)
        patch.setattr(deadlines, "REPORT", 0.5)
        held = ranks.Ranks(TINY)
        yield held
        held.close()


def result(latent, dtype="float32"):
    load = LoadInfo(0.0, 0, False, dtype, dtype)
    return SampleResult(latent, RunInfo("native", ParallelStrategy(), load=load))


# On real ranks of the CPU: first the checks that use one device, then those that use two.

GOOD = [
    ("installation", {"Software: torch": "ok", "Devices: CPU": "ok"}),
    ("device", {"device, process 0": "ok", "allocator, process 1": "skipped"}),
    ("attention", {"torch, process 0": "ok", "merge by torch, process 1": "ok"}),
    ("checkpoint", {"loading": "ok", "memory": "ok", "NVML": "skipped"}),
    ("steps", {"uncompiled": "ok", "compiled": "ok"}),
    ("syncs", {"host reads, process 1": "ok"}),
    ("same bits", {"two runs": "ok"}),
    ("fp8", {"fp8": "ok"}),
    ("offload", {"offload": "ok"}),
    ("sleep", {"give back": "ok", "sleep": "ok"}),
    ("comfyui", {"text encoder and VAE": "skipped"}),
    (
        "strategies",
        {"same latent at 64 × 64": "ok", "same latent at 72 × 56": "ok", "steps": "ok"},
    ),
    ("links", {"all-reduce": "ok", "data": "ok"}),
    *((f"pipefusion {w} {p}", {f"warm-up {w}, {p} patches": "ok"}) for w, p in several_gpus.PIPES),
    ("one process", {"memory after each": "ok"}),
    ("cancel", {"cancel": "ok"}),
    ("kill", {"killed process": "ok"}),
    ("out of memory", {"out of memory": "ok"}),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "expected"), GOOD, ids=[name for name, _ in GOOD])
def test_a_check_on_the_cpu_finds_nothing_wrong(two, name, expected):
    found = {finding.name: finding for finding in CHECKS[name].examine(two)}
    assert {name: found[name].status for name in expected} == expected, found


def test_the_profile_of_a_compiled_model_call_is_the_first_process_s(two):
    (found,) = CHECKS["profile"].examine(two)
    assert (found.name, found.status) == ("profile, process 0", "ok")
    assert found.finding.startswith("Ulysses 2, compiled: one model call takes")
    assert any("addmm" in line for line in found.details)


def test_each_check_is_tried_above():
    """The exceptions: the profile has a test of its own, and the check of card identities needs NVML."""
    assert set(CHECKS) - {name for name, _ in GOOD} == {"profile", "identity"}


# What is wrong is found.

EXPECTED = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("latent", "dtype", "compared", "same"),
    [
        (EXPECTED, "float32", "ok", "ok"),
        (EXPECTED + 1e-6, "float32", "ok", "slow"),
        (EXPECTED + 0.01, "float32", "broken", "broken"),
        (EXPECTED + 0.01, "bfloat16", "ok", "slow"),
        (EXPECTED + 0.5, "bfloat16", "broken", "broken"),
        (EXPECTED * torch.nan, "bfloat16", "broken", "broken"),
    ],
)
def test_a_latent_that_differs_is_told_by_the_measure_of_its_dtype(latent, dtype, compared, same):
    expected = result(EXPECTED, dtype)
    assert ranks.compared("x", result(latent, dtype), expected, "twice").status == compared
    assert ranks.same_bits("x", result(latent, dtype), expected, "twice").status == same


class Scripted(ranks.Ranks):
    """Ranks whose jobs return the given latents, one after the other."""

    def __init__(self, *latents):
        super().__init__(TINY)
        self.latents = list(latents)

    def sample(self, *_, **__):
        return result(self.latents.pop(0))

    def group(self, *_, **__):
        return self

    def load(self, *_):
        pass


def test_another_picture_in_fp8_and_under_a_split_is_found():
    (fp8,) = one_gpu.check_fp8(Scripted(EXPECTED, -EXPECTED))
    assert fp8.status == "broken" and "another picture" in fp8.finding
    splits = [EXPECTED] * 2 * len(several_gpus.SPLITS)
    wrong = list(several_gpus.check_strategies(Scripted(EXPECTED, EXPECTED, EXPECTED + 1, *splits[1:])))
    assert [f.status for f in wrong] == ["broken", "ok", "ok"] and "Ulysses 2" in wrong[0].finding


def test_pipefusion_that_gives_no_numbers_is_found():
    (found,) = several_gpus.pipefusion(0, 6)(Scripted(EXPECTED * torch.inf))
    assert found.status == "broken" and "not finite" in found.finding


def test_a_job_that_does_not_end_within_its_own_limit_or_its_checks_is_ended(two, monkeypatch):
    with pytest.raises(ParallelError, match="did not end within 0 s"):
        two.sample(steps=50, limit_s=0.0)
    monkeypatch.setattr(two, "deadline", 0.0)
    with pytest.raises(ParallelError, match="did not end within 0 s"):
        two.sample(steps=50)


def test_processes_hold_no_model_while_they_are_checked(two):
    two.sample()
    assert two.memory(1)[0].weight_bytes > 0
    assert list(two.check("device", 1)) and two.memory(1)[0].weight_bytes == 0


def test_memory_beyond_the_prediction_and_memory_that_grows_are_told():
    assert one_gpu.judge_memory("…", 12.2e9, 12e9).status == "ok"
    assert one_gpu.judge_memory("…", 24e9, 12e9).status == "slow"
    assert several_gpus.judge_growth({"Ring 2": 10**9}, {"Ring 2": 10**9 + 10**7}).status == "ok"
    grown = several_gpus.judge_growth(
        {"Ring 2": 10**9, "CFG 2": 10**9}, {"Ring 2": 2 * 10**9, "CFG 2": 10**9}
    )
    assert grown.status == "slow" and "grows with Ring 2" in grown.finding and len(grown.details) == 2


@pytest.mark.parametrize(
    ("cards", "status", "words"),
    [
        ((0, 1), "ok", "by the same numbers"),
        ((1, 0), "broken", "in another order"),
        ((0, 0), "broken", "two processes compute on one card"),
        ((0, 7), "slow", "does not know the cards"),
    ],
)
def test_cards_that_nvml_and_cuda_take_for_others_are_told(monkeypatch, cards, status, words):
    """`cards`: the NVML indices of the cards that the ranks of cuda:0 and cuda:1 found."""
    nvml = fake_nvml.h100_nvswitch(2)
    monkeypatch.setattr(one_gpu, "read_visible", lambda: read_topology(nvml))
    facts = [SimpleNamespace(device_uuid=f"{card:08x}-aaaa-bbbb-cccc-{card:012x}") for card in cards]
    monkeypatch.setattr(one_gpu, "probe_links", lambda *_: [SimpleNamespace(facts=f) for f in facts])
    subject = make_subject(("cuda:0", "cuda:1"))
    (found,) = one_gpu.check_identity(SimpleNamespace(subject=subject, group=lambda count: None))
    assert found.status == status and words in found.finding
