"""Errors by which torch and its libraries report exhausted memory or a failed device, and those that leave ranks
usable."""

import pytest
import torch
import torch.distributed as dist

from parallel_backend.engine.comm.groups import Traffic
from parallel_backend.errors import RankFailed, RequestError
from parallel_backend.rank.outcome.errors import failure, is_out_of_memory, refusing

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)

# (error, message), as users of torch report them; long messages are cut.
MEMORY = [
    (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB",
    ),
    (MemoryError, ""),
    # raised by cudaMallocAsync, kernels that need local memory, pin_memory, and the first context on a full card
    (
        ACCELERATOR_ERROR,
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other",
    ),
    (
        RuntimeError,
        "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API",
    ),
    (RuntimeError, "CUDA driver error: out of memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (
        dist.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nFailed to CUDA calloc async 608 bytes: 'out of memory'",
    ),
    (
        dist.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-5gOYrL (size 9637888), error: "
        "Cannot allocate memory (12)",
    ),
    (
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (
        RuntimeError,
        "unable to mmap 1342177280 bytes from file </models/flux.safetensors>: Cannot allocate memory (12)",
    ),
]
DEVICE = [
    (ACCELERATOR_ERROR, "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
    (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m)`",
    ),
    (
        RuntimeError,
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ),
    (RuntimeError, "HIP error: an illegal memory access was encountered"),
    (RuntimeError, "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA` to"),
    (RuntimeError, "CUDA error: unknown error"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    (
        dist.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, remote process exited or there was a "
        "network error, NCCL version 2.26.2\nncclRemoteError: A call failed possibly due to a network error",
    ),
]
_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2588, "
# (message, words of the cause, words of the remedy) of errors that would occur again: nothing is restarted, no
# device is left out. Their classes are RuntimeError and its subclasses, and only the text counts.
REPEATS = [
    (
        f"{_NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nError while "
        "creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)",
        "too small",
        "--shm-size",
    ),
    (
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevicesUnavailable' in",
        "second process",
        "nvidia-smi -c DEFAULT",
    ),
    ("CUDA error: system not yet initialized\nCUDA kernel errors might be", "NVSwitch", "fabricmanager"),
    (
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "driver",
        "nvidia-smi shows",
    ),
    ("CUDA error: forward compatibility was attempted on non supported HW", "driver", "cuda-compat"),
    ("CUDA error: system has unsupported display driver / cuda driver combination", "driver", "Restart"),
    (
        "CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "driver",
        "update the driver",
    ),
    (
        "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be",
        "without code for this GPU",
        "Install builds",
    ),
    ("Triton Error [CUDA]: device kernel image is invalid", "without code", "attention: torch"),
    ("HIP error: invalid device function", "without code", "leave the GPU out"),
    ("CUDA error: device-side assert triggered\nCUDA kernel", "points at", "another model"),
    (
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, desc)`",
        "no kernel for this product",
        "weight_dtype",
    ),
    (
        f"{_NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nncclInvalidUsage: This "
        "usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both "
        "on CUDA device 10",
        "given one GPU",
        "Name each GPU once",
    ),
    (
        f"{_NCCL}unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 217 'peer access is not supported between these two devices'",
        "reach each other's memory",
        "NCCL_P2P_DISABLE=1",
    ),
    (
        f"{_NCCL}internal error - please report this issue to the NCCL developers, NCCL version 2.21.5\n"
        "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
        "loopback",
        "ip link set lo up",
    ),
]


@pytest.mark.parametrize(("kind", "message"), MEMORY, ids=lambda value: str(value)[:40])
def test_memory_that_ran_out_is_told_as_that(kind, message):
    told = failure(kind(message), 1, "cuda:1")
    assert told.kind == "OutOfMemory" and is_out_of_memory(kind(message))
    assert "Process 1 ran out of memory on cuda:1" in told.message and "smaller image" in told.message


@pytest.mark.parametrize(("kind", "message"), DEVICE, ids=lambda value: str(value)[:40])
def test_a_device_that_failed_is_no_lack_of_memory(kind, message):
    assert failure(kind(message), 1, "cuda:1").kind == "RankCrashed"


@pytest.mark.parametrize(("message", "cause", "remedy"), REPEATS, ids=lambda value: str(value)[:40])
def test_what_another_try_would_meet_again_is_told_with_its_remedy(message, cause, remedy):
    told = failure(RuntimeError(message), 1, "cuda:1")
    first, *rest = told.message.splitlines()
    assert told.kind == "RankFailed" and cause in first and remedy in first
    assert message.splitlines()[0] in rest[0], "the library's own words follow"


def test_a_device_that_failed_is_told_with_what_to_look_at():
    told = failure(RuntimeError("CUDA error: uncorrectable ECC error encountered"), 0, "cuda:0")
    assert "ECC,ROW_REMAPPER" in told.message.splitlines()[0]
    told = failure(dist.DistBackendError(f"{_NCCL}unhandled cuda error, NCCL version 2.7.8"), 0, "cuda:0")
    assert told.kind == "RankCrashed" and "NCCL_DEBUG=WARN" in told.message


def test_what_the_code_raises_is_neither():
    assert failure(RuntimeError("The size of tensor a (3) must match"), 0, "cuda:0").kind == "RankFailed"
    assert failure(ValueError("the prompt says: out of memory"), 0, "cuda:0").kind == "RankFailed"


def test_an_input_that_does_not_fit_is_refused_with_the_modules_own_words():
    with (
        pytest.raises(RequestError, match=r"WanModel cannot compute.*RuntimeError: mat1 and mat2"),
        refusing("WanModel", Traffic()),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RankFailed(0, "a hang"),
        KeyError("a mistake of the code"),
    ],
)
def test_what_the_input_is_not_to_blame_for_stays_what_it_is(error):
    with pytest.raises(type(error)) as raised, refusing("WanModel", Traffic()):
        raise error
    assert raised.value is error


def test_after_a_collective_began_others_may_wait_for_this_rank():
    traffic = Traffic()
    traffic.add(1, torch.ones(1))
    with pytest.raises(RuntimeError, match="half-way"), refusing("WanModel", traffic):
        traffic.add(0, torch.ones(1))
        raise RuntimeError("half-way")
