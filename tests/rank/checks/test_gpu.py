"""A rank's checks for `doctor --gpu`: on the CPU as far as possible, and the CUDA logic with a fake."""

import math
from types import SimpleNamespace

import pytest
import torch

from fake_cuda import FakeCuda
from parallel_backend.engine.attention import kernel_choice, kernels
from parallel_backend.rank.checks import gpu
from parallel_backend.rank.checks import gpu_attention as attention
from parallel_backend.rank.checks.gpu import check_device
from parallel_backend.rank.checks.gpu_module_call import count_reads, describe_profile, find_waits
from parallel_backend.wire.heartbeat import Heartbeat

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# The device.


def test_a_card_is_told_with_torchs_own_allocator_and_without_its_serial_number(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device, allocator = check_device(CUDA, FakeCuda())
    assert (device.status, allocator.status) == ("ok", "ok")
    assert (
        "NVIDIA L40" in device.finding
        and "8.9" in device.finding
        and "40.0 of 48.0 GB free" in device.finding
    )
    assert "5a1b2c3d" not in device.finding and "UUID known" in device.finding
    assert allocator.finding == "native (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
    assert "not told" in check_device(CUDA, FakeCuda(uuid=""))[0].finding


def test_the_allocator_that_runs_out_beside_nccl_is_broken():
    _, allocator = check_device(CUDA, FakeCuda("cudaMallocAsync"))
    assert (
        allocator.status == "broken"
        and "cudaMallocAsync" in allocator.finding
        and "backend:" in allocator.remedy
    )


def test_the_cpu_has_no_such_allocator():
    device, allocator = check_device(CPU)
    assert device.status == "ok" and (allocator.status, allocator.finding[:6]) == ("skipped", "no GPU")


# Memory that is used up on purpose.


def test_a_device_is_filled_once_after_a_step_and_no_further_than_it_is_large(monkeypatch):
    """Some drivers, such as WSL2's, continue in host memory, so an allocation never fails."""
    taken, beats = [], Heartbeat()
    monkeypatch.setattr(gpu, "heartbeat", beats)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10 * gpu._PIECE + 5))
    monkeypatch.setattr(torch, "empty", lambda size, **_: taken.append(size))
    gpu.fill_device_after_a_step()
    beats.begin()
    assert taken == []
    with pytest.raises(torch.OutOfMemoryError):
        beats.steps_done(1)
    beats.steps_done(1)
    assert len(taken) == 10


# Attention.


def test_inputs_lie_as_an_exchange_of_ulysses_leaves_them():
    query, key, value = attention.ulysses_layout(CPU, 10, 2)
    assert query.shape == (1, 2, 10, 128) and query.dtype == torch.bfloat16
    assert query.stride()[2] == 3 * 2 * 128 and not query.is_contiguous()
    assert key.data_ptr() - query.data_ptr() == value.data_ptr() - key.data_ptr() == 2 * 128 * 2


def test_torchs_kernel_and_both_merges_are_exact_on_the_cpu_and_the_others_say_what_they_lack():
    found = {finding.name: finding for finding in attention.check_attention(CPU, 96)}
    exact = {name for name, f in found.items() if f.status == "ok"}
    assert exact == {"torch", "merge by torch", "merge with a mask"}
    assert {name for name, f in found.items() if f.status == "skipped"} == {
        "cudnn",
        "flash",
        "flash_3",
        "sage",
    }
    assert all("needs a GPU" in f.finding for f in found.values() if f.status == "skipped")


@pytest.fixture
def installed(monkeypatch):
    """Returns use(compute, weigh): it makes every kernel seem installed, changes outputs, and returns the findings."""
    monkeypatch.setattr(kernel_choice, "why_not", lambda kernel, device, dtype: None)
    real, real_with_lse = kernels.attend, kernels.attend_with_lse

    def use(compute, weigh=lambda name, lse: lse):
        def attend_with_lse(q, k, v, mask, name):
            out, lse = real_with_lse(q, k, v, mask)
            return compute(name, out), weigh(name, lse)

        monkeypatch.setattr(kernels, "attend", lambda q, k, v, name: compute(name, real(q, k, v, "torch")))
        monkeypatch.setattr(kernels, "attend_with_lse", attend_with_lse)
        return {finding.name: finding for finding in attention.check_attention(CPU, 64)}

    return use


def test_a_kernel_that_is_wrong_and_one_that_raises_are_broken_by_name(installed):
    def compute(name, out):
        if name == "flash":
            return out * 1.1
        if name == "cudnn":
            raise RuntimeError("No available kernel")
        return out * math.nan if name == "flash_3" else out * 1.05 if name == "sage" else out

    found = installed(compute)
    statuses = {name: f.status for name, f in found.items() if not name.startswith("merge")}
    assert statuses == {
        "torch": "ok",
        "cudnn": "broken",
        "flash": "broken",
        "flash_3": "broken",
        "sage": "ok",
    }
    assert "No available kernel" in found["cudnn"].finding and "attention: torch" in found["flash"].remedy


def test_each_kernel_merges_by_its_own_log_sum_exp(installed):
    def weigh(name, lse):
        if name == "cudnn":
            raise RuntimeError("no log-sum-exp")
        return lse / math.log(2) if name == "flash" else lse  # FlashAttention uses base 2 internally

    found = installed(lambda name, out: out, weigh)
    assert {name: f.status for name, f in found.items() if name.startswith("merge")} == {
        "merge by torch": "ok",
        "merge by cudnn": "broken",
        "merge by flash": "broken",
        "merge by flash_3": "ok",
        "merge with a mask": "ok",
    }
    assert found["flash"].status == "ok" and "attention: torch" in found["merge by flash"].remedy
    assert "no log-sum-exp" in found["merge by cudnn"].finding


def test_a_merge_that_weighs_wrongly_is_broken(monkeypatch):
    monkeypatch.setattr(kernels, "merge", lambda parts, dtype: sum(out for out, _ in parts) / 2)
    found = {finding.name: finding for finding in attention.check_attention(CPU, 64)}
    assert found["merge by torch"].status == found["merge with a mask"].status == "broken"
    assert "prefer Ulysses" in found["merge by torch"].remedy


# One model call.


def test_a_call_that_never_waits_is_ok_and_the_mode_is_as_before():
    cuda = FakeCuda()
    assert find_waits(lambda: None, cuda).status == "ok"
    assert cuda.modes == ["error", 0]


def test_each_place_at_which_the_host_waits_is_told():
    cuda = FakeCuda()

    def call():
        cuda.wait()
        cuda.wait()

    found = find_waits(call, cuda)
    assert found.status == "slow" and "waits for the device 2 times" in found.finding
    assert len(found.details) == 2 and "test_gpu.py" in found.details[0]
    assert cuda.modes == ["error", 0, "warn", 0] and "/" not in found.details[0]


def test_another_error_of_a_call_is_no_wait():
    def call():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = FakeCuda()
    with pytest.raises(RuntimeError, match="illegal memory"):
        find_waits(call, cuda)
    assert cuda.modes == ["error", 0]


def test_values_that_the_host_reads_are_counted():
    number = torch.ones(1)
    assert count_reads(lambda: number + number) == {}
    assert count_reads(lambda: [number.item(), float(number), torch.ones(3).nonzero()]) == {
        "_local_scalar_dense": 2,
        "nonzero": 1,
    }


def test_a_profile_of_a_gpu_counts_kernels_and_not_the_operators_that_launched_them():
    def event(key, kind, device_us, cpu_us=0.0, is_user_annotation=False):
        return SimpleNamespace(
            key=key,
            device_type=kind,
            self_device_time_total=device_us,
            self_cpu_time_total=cpu_us,
            count=1,
            is_user_annotation=is_user_annotation,
        )

    events = [
        event("aten::mm", "DeviceType.CPU", 900.0, 50.0),
        event("gemm", "DeviceType.CUDA", 900.0),
        event("Torch-Compiled Region: 0/0", "DeviceType.CUDA", 1000.0, is_user_annotation=True),
        event("n" * 200, "DeviceType.CUDA", 100.0),
    ]
    found = describe_profile(events, 0.002, True, "Ulysses 2")
    assert "takes 2.0 ms, of which the device computes 1.0 ms" in found.finding
    assert found.details[0].split() == ["0.900", "ms", "1", "×", "gemm"] and len(found.details) == 2
    assert len(found.details[1]) < 100
    assert "operators take 0.1 ms" in describe_profile(events, 0.002, False, "one device").finding
