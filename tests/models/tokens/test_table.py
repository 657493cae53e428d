"""The table of ComfyUI's classes: how a call splits tokens, and that each entry is consistent in itself."""

import pytest
import torch

from parallel_backend.models.tokens.table import token_mode
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS, STAY

CONTEXT = torch.zeros(1, 4, 8)
USUAL = {
    "cond_or_uncond": [1, 0],
    "sigmas": torch.ones(1),
    "sample_sigmas": torch.ones(5),
    "uuids": ["a", "b"],
}


@pytest.mark.parametrize(
    ("class_name", "kwargs", "mode"),
    [
        ("Flux", {"context": CONTEXT}, STAY),
        ("Flux", {"context": CONTEXT, "ref_latents": [CONTEXT]}, STAY),
        ("Flux", {"context": CONTEXT, "ref_latents": [CONTEXT], "ref_latents_method": None}, STAY),
        ("Flux", {"context": CONTEXT, "ref_latents_method": "index_timestep_zero"}, BLOCK),
        ("WanModel", {"context": CONTEXT, "control": None}, STAY),
        ("WanModel", {"context": CONTEXT, "time_dim_concat": CONTEXT}, STAY),
        ("VaceWanModel", {"context": CONTEXT, "time_dim_concat": CONTEXT}, BLOCK),
        ("WanModel_S2V", {"context": CONTEXT, "audio_embed": CONTEXT}, BLOCK),
        ("HunyuanVideo", {"context": CONTEXT, "ref_latent": CONTEXT}, BLOCK),
        ("LTXVModel", {"context": CONTEXT, "keyframe_idxs": CONTEXT}, STAY),
        ("LTXAVModel", {"context": CONTEXT, "ref_audio": CONTEXT}, BLOCK),
        ("HiDreamImageTransformer2DModel", {"context": CONTEXT}, BLOCK),
        ("UNetModel", {"context": CONTEXT}, BANDS),
        ("StageC", {"clip_text": CONTEXT}, ATTENTION),
        ("ACEStepTransformer2DModel", {"context": CONTEXT}, ROWS),
    ],
)
def test_tokens_stay_apart_only_in_call_shapes_that_were_proven(class_name, kwargs, mode):
    assert token_mode(class_name, kwargs) == mode
    assert token_mode(class_name, kwargs | {"transformer_options": USUAL}) == mode


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, STAY),
        ({"patches": {}, "patches_replace": {"dit": {}}, "callbacks": {}, "flag": False}, STAY),
        ({"patches": {"double_block": ["patch"]}}, BLOCK),
        ({"patches_replace": {"dit": {"double_block.1": "patch"}}}, BLOCK),
        ({"some_pack": 0.5}, BLOCK),
        ({"some_pack": torch.zeros(3)}, BLOCK),
    ],
)
def test_options_that_a_patch_may_read_need_whole_tokens(options, mode):
    assert token_mode("Flux", {"context": CONTEXT, "transformer_options": USUAL | options}) == mode
