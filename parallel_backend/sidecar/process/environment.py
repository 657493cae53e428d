"""The environment a rank starts with: what it needs to find its libraries and devices, and nothing secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ...devices import is_cpu
from ...options import COMPILE_BACKEND, DEVICE_QUEUES, FAULT, THREADS_ALONE
from ...wire.cache_folder import user_cache

_NAMES = {
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LIBRARY_PATH",  # here and in CPATH compilers of Conda and Nix look for CUDA
    "CPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "HF_HOME",
    "CC",
    "CXX",
    "COMFYUI_ENABLE_MIOPEN",  # without it, ComfyUI turns MIOpen off on most AMD cards
    COMPILE_BACKEND,
    FAULT,
}
_PREFIXES = (
    "LC_",
    "XDG_",
    "CUDA",
    "CUBLAS",  # ComfyUI's --deterministic sets CUBLAS_WORKSPACE_CONFIG
    "CUDNN_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "KMP_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "ROCBLAS_",
    "HIPBLAS",
    "MIOPEN_",
    "FLASH_ATTENTION_",  # which of its two builds flash-attn uses on ROCm
    "DISABLE_ADDMM_",  # torch's switches for fused products
    "MALLOC_",
)
# Three variables have configured torch's allocator over time.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Ranks on the CPU see no GPU: libraries (comfy, xfuser) would take a visible one as the device, and a process cannot
# use a GPU if its parent looked for one before the fork (rank/checks/module_parity.py). HIP ignores an empty value,
# hence -1.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "API_KEY")


def interpreter_flags() -> list[str]:
    """Returns the flags of this interpreter that affect what a rank imports and how. Not -P and -I: Python finds the
    rank's module in its working directory."""
    requested = (
        ("-s", sys.flags.no_user_site),  # PYTHONNOUSERSITE too
        ("-E", sys.flags.ignore_environment),
        ("-B", sys.flags.dont_write_bytecode),
        ("-O", sys.flags.optimize),
    )
    return [flag for flag, count in requested for _ in range(count)]


def rank_environment(source: Mapping[str, str], root: Path, devices: tuple[str, ...]) -> dict[str, str]:
    """Returns the part of `source` a rank may see and what ranks of `devices` need. `root`: first in PYTHONPATH."""
    passed = {
        name: value
        for name, value in source.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRET)
    }
    for name in passed.keys() & set(_ALLOCATOR):
        passed[name] = _without_backend(passed[name])
    # OpenMP takes one number per nesting level. It ignores other values, and each rank would then use all cores.
    outermost = passed.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not outermost.isdecimal() or not int(outermost):
        passed.pop("OMP_NUM_THREADS", None)
        outermost = ""
    search = [str(root), *filter(None, [source.get("PYTHONPATH")])]
    cores = len(os.sched_getaffinity(0))
    # MALLOC_* is left to glibc: a low mmap threshold gives memory back sooner but maps every activation anew, which
    # cost a quarter of the step time and made two ranks less efficient (docs/benchmarks.md).
    threads = max(1, cores // len(devices))
    # torch's default is 32 compile processes per rank.
    compiling = 1 if is_cpu(devices) else min(4, threads)
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(compiling)}
    if is_cpu(devices) and "OMP_WAIT_POLICY" not in passed:
        # If other programs run, threads that spin while they wait for a thread without a core make a step 10 times as
        # long. libgomp itself uses this number of spins if it knows that there are more threads than cores.
        defaults["GOMP_SPINCOUNT"] = "1000"
    if cache := user_cache(source):
        defaults["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "compiled")  # torch's own is lost at the next boot
    fixed = DEVICE_QUEUES | {
        THREADS_ALONE: outermost or str(cores),
        "PYTHONPATH": os.pathsep.join(search),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",  # weights come from ComfyUI's folders, never from the network
    }
    return defaults | passed | fixed | (_NO_GPU if is_cpu(devices) else {})


def _without_backend(settings: str) -> str:
    """Removes the backend from an allocator's settings, so that torch's own is used.

    ComfyUI sets backend:cudaMallocAsync for itself; with that and NCCL, ranks run out of memory after a few steps
    (raylight issue 99).
    """
    options = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", settings)  # a value may be a list: [256:1,512:2]
    return ",".join(option for option in options if option.partition(":")[0].strip() != "backend")
