"""The choice of the attention kernel: by a table, and by a trial of each kernel with a fake dispatcher of diffusers."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.engine.attention import kernel_choice, kernels
from parallel_backend.engine.attention.kernel_choice import KernelChoice, candidates, kernel_for, why_not
from parallel_backend.engine.attention.kernels import KERNELS
from parallel_backend.errors import RequestError
from parallel_backend.options import APPROXIMATE_KERNELS, ATTENTION_KERNELS

BLACKWELL, HOPPER, AMPERE, TURING = (10, 0), (9, 0), (8, 6), (7, 5)
FLASH_2, FLASH_3 = {"flash_attn"}, {"flash_attn", "flash_attn_interface"}


@pytest.fixture
def have(monkeypatch):
    """Returns a function that gives this process a card of a compute capability, packages, and ROCm if `hip` is set."""

    def given(capability, installed, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(kernel_choice, "find_spec", lambda name: name if name in installed else None)
        monkeypatch.setattr(torch.version, "hip", hip)

    return given


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "kernel"),
    [
        ("cpu", torch.bfloat16, HOPPER, FLASH_3, "torch"),
        ("cuda", torch.float32, HOPPER, FLASH_3, "torch"),
        ("cuda", torch.bfloat16, HOPPER, FLASH_3, "flash_3"),
        ("cuda", torch.float16, HOPPER, FLASH_2, "cudnn"),
        ("cuda", torch.bfloat16, HOPPER, set(), "cudnn"),
        ("cuda", torch.bfloat16, BLACKWELL, FLASH_3, "cudnn"),
        ("cuda", torch.bfloat16, AMPERE, FLASH_3, "flash"),
        ("cuda", torch.bfloat16, AMPERE, {"sageattention"}, "torch"),
        ("cuda", torch.float16, TURING, FLASH_3, "torch"),
    ],
)
def test_the_fastest_exact_kernel_that_can_run_is_chosen(have, device, dtype, capability, installed, kernel):
    have(capability, installed)
    found = [kernel.name for kernel in candidates(torch.device(device), dtype)]
    assert [*found, "torch"][0] == kernel


EVERYTHING = {kernel.package for kernel in KERNELS}


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "installed", "words"),
    [
        ("sage", "cpu", torch.bfloat16, (0, 0), EVERYTHING, "needs a GPU"),
        ("cudnn", "cuda", torch.float32, HOPPER, EVERYTHING, "weight_dtype bfloat16"),
        ("flash_3", "cuda", torch.bfloat16, AMPERE, EVERYTHING, "9.x (Hopper), and this GPU has 8.6"),
        ("flash_3", "cuda", torch.bfloat16, BLACKWELL, EVERYTHING, "has 10.0"),
        ("flash", "cuda", torch.float16, TURING, EVERYTHING, "8.0 or more, and this GPU has 7.5"),
        ("sage", "cuda", torch.float16, AMPERE, FLASH_3, "pip install sageattention"),
        ("sage", "cuda", torch.float16, AMPERE, EVERYTHING, None),
    ],
)
def test_what_a_kernel_lacks_is_said(have, name, device, dtype, capability, installed, words):
    have(capability, installed)
    reason = why_not(kernels.BY_NAME[name], torch.device(device), dtype)
    assert reason is None if words is None else words in reason


def test_a_kernel_that_cannot_run_here_is_refused_with_the_remedy():
    cpu = torch.device("cpu")
    for wish in ("auto", "torch"):
        assert kernel_for(cpu, torch.float32, wish) == KernelChoice("torch")
    for wish in ATTENTION_KERNELS[2:]:
        with pytest.raises(
            RequestError, match=rf"attention {wish} cannot run on cpu: .* Choose attention auto"
        ):
            kernel_for(cpu, torch.float32, wish)


def test_every_kernel_that_a_person_can_choose_is_known():
    assert {kernel.name for kernel in KERNELS} | {"auto", "torch"} == set(ATTENTION_KERNELS)
    assert not {kernel.name for kernel in KERNELS if kernel.auto} & set(APPROXIMATE_KERNELS)


def test_on_rocm_only_what_has_a_build_for_it_is_chosen(have):
    have((9, 4), EVERYTHING, hip="6.4")  # gfx942, which looks like Hopper
    card = torch.device("cuda:0")
    assert [kernel.name for kernel in candidates(card, torch.bfloat16)] == ["flash"]
    for name in ("cudnn", "flash_3"):
        assert "this is ROCm" in why_not(kernels.BY_NAME[name], card, torch.bfloat16)


def _lse(query, key):
    return (query.float() @ key.float().mT / query.shape[-1] ** 0.5).logsumexp(-1)


class Dispatcher:
    """A fake of diffusers' dispatch_attention_fn, [B, S, H, D]. `broken`: by kernel, the error to raise, or "zeros"."""

    def __init__(self, **broken):
        self.broken, self.strides = broken, []

    def __call__(self, query, key, value, *, backend, attention_kwargs):
        self.strides.append((backend, query.stride()))
        fault = self.broken.get(backend)
        if isinstance(fault, Exception):
            raise fault
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = kernels.F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        lse = _lse(query, key)
        lse = lse.transpose(1, 2) if backend == "_flash_3" else lse
        out = torch.zeros_like(out) if fault == "zeros" else out
        return (out, lse) if attention_kwargs.get("return_lse") else out


@pytest.fixture
def hopper(monkeypatch, have):
    """Yields a function that installs a dispatcher and returns a fake GPU (9.0, all packages, tensors on the CPU)."""

    def with_dispatcher(dispatcher):
        monkeypatch.setattr(kernels, "dispatch_attention_fn", dispatcher)
        have(HOPPER, EVERYTHING)
        delivered = kernel_choice._as_delivered
        cpu = torch.device("cpu")
        monkeypatch.setattr(kernel_choice, "_as_delivered", lambda _, *rest: delivered(cpu, *rest))
        return torch.device("cuda:0")

    for cached in (kernel_choice.fault_of, kernel_choice._fastest):
        cached.cache_clear()
    yield with_dispatcher
    for cached in (kernel_choice.fault_of, kernel_choice._fastest):
        cached.cache_clear()


def test_a_kernel_that_does_not_work_here_is_passed_over_and_named(hopper):
    # What diffusers raises without a flash-attn that it can use.
    no_kernel = TypeError("'NoneType' object is not callable")
    dispatcher = Dispatcher(_flash_3=no_kernel, _native_cudnn="zeros")
    device = hopper(dispatcher)
    choice = kernel_for(device, torch.bfloat16)
    assert choice.name == "flash"
    flash_3, cudnn = choice.notes
    assert "passed over flash_3: it does not work here (TypeError: 'NoneType'" in flash_3
    assert "passed over cudnn: it is off by" in cudnn
    tried = len(dispatcher.strides)
    # A kernel is tried once per process.
    assert kernel_for(device, torch.bfloat16) == choice and len(dispatcher.strides) == tried


def test_where_no_kernel_works_torchs_own_computes(hopper):
    broken = dict.fromkeys(("_flash_3", "_native_cudnn", "flash"), RuntimeError("No available kernel"))
    choice = kernel_for(hopper(Dispatcher(**broken)), torch.float16)
    assert choice.name == "torch" and len(choice.notes) == 3


def test_a_kernel_is_tried_on_the_strides_that_ulysses_delivers(hopper):
    dispatcher = Dispatcher()
    assert kernel_for(hopper(dispatcher), torch.bfloat16) == KernelChoice("flash_3")
    exchanged = torch.empty(72, 3, 1, 2, 128)[:, 0].permute(1, 2, 0, 3)  # as to_heads (sequence.py) gives it
    assert ("_flash_3", exchanged.transpose(1, 2).stride()) in dispatcher.strides


def test_a_wish_that_gives_wrong_numbers_is_refused(hopper):
    with pytest.raises(RequestError, match=r"attention flash cannot run on cuda:0: it is off by"):
        kernel_for(hopper(Dispatcher(flash="zeros")), torch.bfloat16, "flash")


def test_a_ring_takes_the_fastest_kernel_whose_log_sum_exp_is_right(hopper, monkeypatch):
    def cudnn(query, key, value, bias, compute_lse):
        assert compute_lse and all(t.is_contiguous() for t in (query, key, value))
        return kernels.F.scaled_dot_product_attention(query, key, value), _lse(query, key).unsqueeze(-1)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    device = hopper(Dispatcher(_flash_3=RuntimeError("no kernel image is available")))
    choice = kernel_for(device, torch.bfloat16, ring=True)
    assert choice.name == "cudnn" and "no kernel image" in choice.notes[0]
    assert kernel_for(device, torch.bfloat16, "sage", ring=True).name == "cudnn"  # sage has no log-sum-exp
    assert kernel_for(device, torch.bfloat16, "flash", ring=True) == KernelChoice("flash")
