"""Ranks take over the variables and torch settings of ComfyUI on which NCCL, kernels or determinism depend."""

from pathlib import Path

import pytest
import torch

from parallel_backend.rank.work.worker import RankWorker
from parallel_backend.sidecar.process.environment import rank_environment
from parallel_backend.wire.protocol import Setup


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ("backend:cudaMallocAsync", ""),  # what ComfyUI sets
        ("expandable_segments:True,backend:cudaMallocAsync", "expandable_segments:True"),
        (
            " backend : native ,roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64",
            "roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64",
        ),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.8"),
    ],
)
def test_a_rank_has_torchs_own_allocator_with_the_users_other_settings(name, settings, kept):
    assert rank_environment({name: settings}, Path("/"), ("cuda:0",))[name] == kept


@pytest.mark.parametrize(
    "name",
    [
        "COMFYUI_ENABLE_MIOPEN",  # read in comfy/model_management.py
        "MIOPEN_FIND_MODE",
        "ROCBLAS_USE_HIPBLASLT",
        "HIPBLASLT_ALLOW_TF32",
        "FLASH_ATTENTION_TRITON_AMD_ENABLE",
        "CUDNN_LOGLEVEL_DBG",
        "DISABLE_ADDMM_CUDA_LT",
        "CUBLAS_WORKSPACE_CONFIG",  # makes cuBLAS deterministic
        *("LIBRARY_PATH", "CPATH"),  # name what compiled blocks are linked to
    ],
)
def test_what_chooses_or_links_kernels_in_comfyuis_process_does_in_ranks(name):
    assert rank_environment({name: "1"}, Path("/"), ("cuda:0",))[name] == "1"


def test_ranks_on_the_cpu_see_no_gpu_and_others_see_the_users():
    """Otherwise comfy and xfuser would use a visible GPU, and self-tests would fork a process that has queried it."""
    source = {"CUDA_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1,0"}
    for devices, seen in ((("cpu:0", "cpu:1"), "-1"), (("cuda:0",), "1,0")):
        environment = rank_environment(source, Path("/"), devices)
        assert {environment[name] for name in source} == {seen}


def test_communicators_never_share_a_devices_queue_whatever_others_recommend():
    for source in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        assert rank_environment(source, Path("/"), ("cuda:0",))["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_what_is_compiled_outlives_a_boot_where_the_user_said_nothing_else():
    def folder(**source):
        return rank_environment(source, Path("/"), ("cuda:0",)).get("TORCHINDUCTOR_CACHE_DIR")

    assert folder(HOME="/home/u") == "/home/u/.cache/comfyui-parallel-sampling/compiled"
    assert folder(HOME="/home/u", TORCHINDUCTOR_CACHE_DIR="/mine") == "/mine"
    assert folder() is None


def test_threads_on_a_cpu_do_not_spin_unless_the_user_said_so():
    def spins(device="cpu:0", **source):
        return rank_environment(source, Path("/"), (device,)).get("GOMP_SPINCOUNT")

    assert spins() == "1000" and spins(GOMP_SPINCOUNT="7") == "7"
    assert spins(OMP_WAIT_POLICY="ACTIVE") is None and spins("cuda:0") is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rank_is_as_deterministic_as_comfyui(deterministic):
    try:
        RankWorker(Setup(0, ("cpu:0",), "unused", deterministic))
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(False)
