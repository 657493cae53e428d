"""A rank computes with the settings that ComfyUI's process has, and has its earlier ones again afterwards."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.job.torch_settings import computing_with, torch_settings

# For settings that are not on or off.
OTHERS = {
    "dtype": torch.float64,
    "deterministic": (True, True),
    "float32_matmul_precision": "medium",
    "matmul.fp32_precision": "tf32",
    "cudnn.fp32_precision": "tf32",
}


@pytest.mark.parametrize("name", torch_settings())
def test_each_setting_is_set_and_put_back(name):
    before = torch_settings()
    value = OTHERS[name] if name in OTHERS else not before[name]
    with computing_with({name: value}):
        assert torch_settings()[name] == value
    assert torch_settings() == before


def test_what_packs_set_is_among_them():
    with computing_with({}):
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        torch.backends.cuda.enable_cudnn_sdp(False)
        there = torch_settings()
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    with computing_with(there):
        assert torch.backends.cuda.matmul.allow_fp16_accumulation
        assert not torch.backends.cuda.cudnn_sdp_enabled()
