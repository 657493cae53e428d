"""Translates errors of CUDA, its driver, NCCL and Triton into a cause and a remedy in a user's words.

The messages come from issues of pytorch, vLLM, SGLang, NCCL and others, and from CUDA's list of errors. Ranks use this
for errors that torch raises; the process that started a rank uses it for what ended the rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# How libraries begin a device's error. Before torch 2.8 all are plain RuntimeErrors, and Triton's still are.
DEVICE_ERROR = re.compile(
    r"(CUDA|HIP|NCCL|CUDA driver|HIP driver) error|Triton Error \[|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
)
_IN_ENVIRONMENT = "in the environment that ComfyUI starts in"


@dataclass(frozen=True)
class DeviceFault:
    """A known fault. `pattern`: matches the library's message; `repeats`: True if a retry fails in the same way."""

    pattern: str
    cause: str
    remedy: str
    repeats: bool = True

    @property
    def words(self) -> str:
        return f"{self.cause}. {self.remedy}"


_FAULTS = (
    DeviceFault(
        r"/dev/shm/nccl-|shared memory segment|posix_fallocate failed",
        "GPUs without peer access exchange their data in /dev/shm, which is too small here or cannot be written to",
        "Start the container with --shm-size=1g or --ipc=host (docker), shm_size (Compose) or an emptyDir of medium "
        "Memory (Kubernetes); remove /dev/shm/nccl-* where a killed program has left such files",
    ),
    DeviceFault(
        r"busy or unavailable",
        "the driver does not let a second process use this GPU",
        "nvidia-smi -c DEFAULT, as root, ends the exclusive compute mode; the doctor names the GPUs that have it",
    ),
    DeviceFault(
        r"system not yet initialized",
        "the switch between these GPUs (NVSwitch) is not set up",
        "Start nvidia-fabricmanager, of the driver's very version (systemctl start nvidia-fabricmanager)",
    ),
    DeviceFault(
        r"driver version is insufficient|driver on your system is too old|unsupported toolchain|"
        r"forward compatibility was attempted|unsupported display driver|[Dd]river/library version mismatch",
        "the NVIDIA driver and this torch do not go together",
        "Restart the machine if its driver was just updated; else update the driver, or install a torch for the CUDA "
        "version that nvidia-smi shows; in a container take cuda-compat out of LD_LIBRARY_PATH",
    ),
    DeviceFault(
        r"no kernel image is available|kernel image is invalid|invalid device function|"
        r"not compatible with the current PyTorch",
        "torch, or a package of attention kernels, was built without code for this GPU",
        "Install builds for it (pytorch.org says which cards a torch knows), choose attention: torch, or leave the GPU "
        "out in the Strategy Selector's devices",
    ),
    DeviceFault(
        r"device-side assert",
        "a number in what the model was given points at something that is not there",
        "Most often the prompt or the latent is of another model: see what the same graph says without the parallel "
        f"nodes. With CUDA_LAUNCH_BLOCKING=1 {_IN_ENVIRONMENT} the error shows where it was",
    ),
    DeviceFault(
        r"CUBLAS_STATUS_NOT_SUPPORTED|CUDNN_STATUS_NOT_SUPPORTED",
        "cuBLAS or cuDNN has no kernel for this product on this GPU",
        "Choose another weight_dtype, or install a newer torch",
    ),
    DeviceFault(
        r"[Dd]uplicate GPU detected",
        "two processes were given one GPU, or two MIG slices of one, which NCCL does not join",
        "Name each GPU once in CUDA_VISIBLE_DEVICES, and one slice of each",
    ),
    DeviceFault(
        r"peer access is not supported|peer mapping resources exhausted|CUDA IPC handle",
        "these GPUs say that they reach each other's memory, and do not",
        f"Set NCCL_P2P_DISABLE=1 {_IN_ENVIRONMENT}; then switch off the IOMMU or ACS in the BIOS",
    ),
    DeviceFault(
        r"no socket interface found|with family \d+ is neither",
        "the processes meet over this machine's loopback network interface, and lo is down or missing",
        "Bring it up (ip link set lo up), or start the container or sandbox with one",
    ),
    DeviceFault(
        r"[Tt]oo many open files",
        "the processes have no file descriptors left",
        "ulimit -n 4096 before ComfyUI starts, or LimitNOFILE= in its service",
    ),
    DeviceFault(
        r"ECC error",
        "the memory of this GPU is damaged (an ECC error that it cannot correct)",
        "Reset the GPU or restart the machine; where it comes again (nvidia-smi -q -d ECC,ROW_REMAPPER), leave the GPU "
        "out in the Strategy Selector's devices and have it replaced",
        repeats=False,
    ),
    DeviceFault(
        r"(?i:cuda (error: |failure \d+ ')?unknown error)|GPU is lost|fallen off the bus|no CUDA-capable device",
        "the driver has lost this GPU",
        "The kernel's log says why (dmesg, the lines with Xid): often power, heat or the slot. Restart the machine",
        repeats=False,
    ),
    DeviceFault(
        r"illegal memory access|misaligned address|illegal instruction|unspecified launch failure|hardware stack error|"
        r"invalid program counter",
        "a kernel went wrong on this GPU",
        "Where it comes again, set compile to off and choose attention: torch, one after the other, and undo an "
        "overclock; lines with Xid in the kernel's log (dmesg) speak for the hardware",
        repeats=False,
    ),
    DeviceFault(
        r"Watchdog caught collective operation timeout|Heartbeat monitor timed out",
        "NCCL gave up waiting for another process",
        "Look at the other processes' devices with the doctor; unset TORCH_NCCL_* variables of your own",
        repeats=False,
    ),
    DeviceFault(
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|unhandled (system|cuda) error",
        "NCCL, which carries data between the GPUs, failed",
        f"NCCL_DEBUG=WARN {_IN_ENVIRONMENT} has it write the reason to ComfyUI's log; NCCL_P2P_DISABLE=1 or "
        "NCCL_CUMEM_ENABLE=0 avoids many",
        repeats=False,
    ),
)


def known_fault(text: str) -> DeviceFault | None:
    """Returns the fault that a library's message `text` names, the most specific first; None if unknown."""
    return next((fault for fault in _FAULTS if re.search(fault.pattern, text)), None)
