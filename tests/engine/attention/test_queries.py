"""Attention with its queries split over ranks: exact for any model that calls ComfyUI's attention, described or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn

from comfy_modules import CASES
from module_references import Reference
from parallel_backend.engine.attention import queries
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.attention import AttentionCall
from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import operations, random
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import ATTENTION, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
pytestmark = pytest.mark.usefixtures("comfyui_here")
ULYSSES_2, ULYSSES_3 = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ulysses_degree=3)
# Models with each kind of mask, with grouped keys, and with sound next to video.
DESCRIBED = ("flux1 + full mask", "qwen-image + text mask", "krea2 + reference, gqa", "ltx-2 (video + sound)")


def _builder(path: str, config: dict[str, Any]) -> Callable[[], nn.Module]:
    """Returns a function that builds a class of ComfyUI's package ldm."""
    return lambda: resolve_name(f"comfy.ldm.{path}")(**config, **operations())


def _times(batch):
    return torch.linspace(0.9, 0.5, batch)


def _mochi(b, h, w):
    mask = torch.ones(b, 9)
    mask[:, 6:] = 0  # padding, which the model crops inside attention
    text = {"context": random(b, 9, 64), "attention_mask": mask, "num_tokens": 6}
    return (random(b, 12, 3, h, w), _times(b)), text


def _cosmos1(b, h, w):
    sizes = torch.tensor([[8.0 * h, 8.0 * w]]).repeat(b, 1)
    kwargs = {"fps": 24.0, "image_size": sizes, "padding_mask": torch.zeros(b, 1, 8 * h, 8 * w)}
    return (random(b, 4, 3, h, w), _times(b)), {"context": random(b, 7, 48), **kwargs}


def _stable_audio(b, h, w):
    return (random(b, 8, h * w), _times(b)), {"context": random(b, 7, 64), "global_embed": random(b, 32)}


def _hidream_o1(b, h, w):
    """Returns (args, kwargs) of a call. A cell is a patch of 32 x 32 pixels."""
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds

    pixels = random(b, 3, 32 * h, 32 * w)
    tokens = torch.tensor([[5, 9, 77, 31, 151673]])  # the last one stands for the timestep
    return (pixels, 1000 * _times(b)), build_extra_conds(tokens, pixels)


def _cascade_c(b, h, w):
    tokens = {"clip_text": 7, "clip_text_pooled": 1, "clip_img": 1}
    return (random(b, 4, h, w), _times(b)), {name: random(b, n, 24) for name, n in tokens.items()}


# Classes whose blocks the pack does not describe, with call inputs (rows, height, width in cells).
UNDESCRIBED = {
    "sdxl + controlnet": (tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet")),
    "sd1.5": (tiny_builder("sd1.5"), tiny_inputs("sd1.5")),
    "mochi, padded text": (_builder("genmo.joint_model.asymm_models_joint:AsymmDiTJoint", {
        "depth": 2, "patch_size": 2, "num_heads": 4, "hidden_size_x": 64, "hidden_size_y": 48, "in_channels": 12,
        "t5_feat_dim": 64, "t5_token_length": 9, "use_t5": True, "mlp_ratio_y": 4.0, "learn_sigma": False,
        "mlp_ratio_x": 192.0,  # the model asserts this width
        "qk_norm": True, "qkv_bias": False, "out_bias": True,
    }), _mochi),
    "cosmos 1": (_builder("cosmos.model:GeneralDIT", {
        "max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 4, "out_channels": 4, "patch_spatial": 2,
        "patch_temporal": 1, "model_channels": 64, "num_blocks": 2, "num_heads": 4, "crossattn_emb_channels": 48,
        "pos_emb_cls": "rope3d", "block_x_format": "THWBD", "affline_emb_norm": True, "use_adaln_lora": True,
        "adaln_lora_dim": 16, "extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable",
    }), _cosmos1),
    "stable audio": (_builder("audio.dit:AudioDiffusionTransformer", {
        "io_channels": 8, "embed_dim": 128, "cond_token_dim": 64, "global_cond_dim": 32, "depth": 2, "num_heads": 2,
    }), _stable_audio),
    "hidream o1": (_builder("hidream_o1.model:HiDreamO1Transformer", {
        "text_config_overrides": {
            "vocab_size": 151700, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "vision_config_overrides": {
            "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "depth": 1, "num_position_embeddings": 16,
        },
    }), _hidream_o1),
    "stable cascade": (_builder("cascade.stage_c:StageC", {
        "c_in": 4, "c_out": 4, "c_r": 16, "patch_size": 1, "c_cond": 32, "c_hidden": [32, 32], "nhead": [2, 2],
        "blocks": [[1, 1], [1, 1]], "block_repeat": [[1, 1], [1, 1]], "level_config": ["CTA", "CTA"],
        "c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 24, "kernel_size": 3,
    }), _cascade_c),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """A lower MIN_KEYS, because tiny models have fewer keys than the real limit."""
    monkeypatch.setattr(queries, "MIN_KEYS", 2)


@functools.cache
def reference(name, size=(1, 8, 8)):
    return Reference(*(UNDESCRIBED | CASES)[name], size)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, ULYSSES_3) for name in (*UNDESCRIBED, *DESCRIBED)),
        ("cosmos 1", ULYSSES_3.replace(device_shares=(1.0, 3.0, 2.0))),
        ("cosmos 1", ParallelStrategy(ring_degree=2)),
        ("cosmos 1", ParallelStrategy(ulysses_degree=2, cfg_degree=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_ranks_that_share_out_queries_give_the_answer_of_one_process(name, strategy):
    one = reference(name, (strategy.cfg_degree, 8, 8))
    for ((worst, sent, notes),) in run_ranks(
        one.on_ranks, strategy.world_size, ATTENTION, Placement(strategy)
    ):
        assert worst <= EXACT
        assert sent > 0 and "share out the queries of attention" in notes[0]


def test_without_the_exchange_the_answer_is_another():
    """Proves that the tolerance is tight enough to show a missing exchange."""
    one = reference("sdxl + controlnet")

    def apart(world):
        def with_zeros(mine, sizes, axis, dim):
            missing = list(mine.shape)
            missing[dim] = sum(sizes) - mine.shape[dim]
            return torch.cat([mine, mine.new_zeros(missing)], dim)

        queries.all_gather = with_zeros
        return one.on_ranks(world, ATTENTION, Placement(ULYSSES_2))[0][0]

    assert min(run_ranks(apart, 2)) > 100 * EXACT


def test_as_many_rows_as_ranks_go_whole_to_each():
    one = reference("sd1.5", (2, 8, 8))
    for ((worst, sent, _),) in run_ranks(one.on_ranks, 2, ATTENTION, Placement(ULYSSES_2)):
        assert worst <= EXACT
        assert sent == one.answer.nbytes // 2  # its row of the answer, and nothing for attention


def test_attention_to_few_keys_stays_whole(monkeypatch):
    monkeypatch.setattr(queries, "MIN_KEYS", 2048)
    for ((worst, sent, _),) in run_ranks(reference("sd1.5").on_ranks, 2, ATTENTION, Placement(ULYSSES_2)):
        assert worst <= EXACT and sent == 0


def test_a_call_leaves_no_attention_behind():
    """The call also has compiled blocks, which must work together with split queries."""
    one = reference("qwen-image + text mask")

    def twice(world):
        placement = Placement(ULYSSES_2, compute_options=ComputeOptions("blocks"))
        compiled = one.on_ranks(world, ATTENTION, placement)[0][0]
        return [compiled, torch.equal(one.alone(), one.answer)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMPILE_BACKEND, "eager")
        for compiled, same in run_ranks(twice, 2):
            assert compiled <= EXACT and same


@pytest.mark.parametrize("rows", [2, 5])
def test_a_mask_that_may_be_of_rows_or_of_queries_is_not_cut(rows):
    """In a mask [a, keys], `a` counts rows for some of ComfyUI's functions, and queries for others."""
    seen = []

    def library(call):
        seen.append((call.q.shape[1], call.mask.shape[0]))
        return call.q

    def calls(world):
        attend = partial(queries.split_queries, Layouts(world).get(ULYSSES_2))
        q = random(rows, 5, 8)
        attend(library, AttentionCall(q, q, q, 2, mask=torch.ones(5, 5)))
        return [list(one) for one in seen]

    expected = [[5, 5], [5, 5]] if rows == 5 else [[2, 2], [3, 3]]
    assert sorted(one for (one,) in run_ranks(calls, 2)) == expected
