"""The table of ComfyUI's classes: how a call splits tokens, and that each entry is consistent in itself."""

import pytest
import torch

from parallel_backend.models.tokens.regions import LAST_BLOCK, Guided, Tokens, Window
from parallel_backend.models.tokens.table import TABLE, token_mode
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


@pytest.mark.parametrize("class_name", TABLE)
def test_an_entry_names_what_it_cuts(class_name):
    for region in TABLE[class_name].regions:
        streams = set()
        for blocks in region.lists.values():
            assert {name for name in blocks.gives if name is not None} <= set(blocks.arguments)
            assert all(
                isinstance(blocks.arguments[name], Tokens) for name in blocks.gives if name is not None
            )
            streams |= {argument.stream for argument in blocks.arguments.values()}
            for attends in blocks.attends:
                attends = attends.stream if isinstance(attends, (Window, Guided)) else attends
                wanted = attends if isinstance(attends, tuple) else (attends,)
                assert {stream for name in wanted if name for stream in name.split("+")} <= {
                    stream for name in streams for stream in name.split("+")
                }
        leaves = region.leaves.stream if isinstance(region.leaves, Tokens) else region.leaves
        assert (leaves is None) == (region.leave in (None, LAST_BLOCK))
        assert leaves is None or leaves in streams


def test_what_stays_has_a_module_to_leave_by():
    for entry in TABLE.values():
        assert not entry.stays_with or any(region.leave for region in entry.regions)
