"""UNets in bands of rows give the answer of one process, for any number of ranks, image size and batch size."""

from __future__ import annotations

import functools

import pytest
import torch

from comfy_modules import UNETS
from module_references import Reference
from parallel_backend.engine.bands import unet as unet_bands
from parallel_backend.models.comfyui.tiny.cases import build_tiny, tiny_builder, tiny_inputs
from parallel_backend.rank.work.call_mode import Foreign, NetworkState, foreign_in, mode_of
from parallel_backend.requests import ATTENTION, BANDS, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
IN_BANDS = "computes a band of the image's rows"
pytestmark = pytest.mark.usefixtures("comfyui_here")


def ulysses(ranks, **others):
    return ParallelStrategy(ulysses_degree=ranks, **others)


def on_ranks(one, strategy):
    """Returns for each rank [[difference, bytes sent, notes]]."""
    return run_ranks(one.on_ranks, strategy.world_size, BANDS, Placement(strategy))


@functools.cache
def reference(name, size):
    return Reference(*UNETS[name], size)


@pytest.mark.parametrize(  # lowest resolution: 2 rows (the image's last band has one), a row per rank, more
    ("name", "strategy", "size"),
    [
        ("sdxl", ulysses(2), (1, 5, 6)),
        ("sdxl + controlnet", ulysses(3), (2, 21, 10)),
        ("sdxl + controlnet", ulysses(4), (1, 16, 9)),
        ("sdxl + controlnet", ulysses(2, cfg_degree=2), (2, 19, 6)),
        ("sdxl + controlnet", ulysses(2, ring_degree=2), (1, 19, 6)),
        ("sdxl + controlnet", ulysses(3, device_shares=(1.0, 3.0, 2.0)), (1, 19, 6)),
        ("sdxl refiner", ulysses(4), (1, 29, 7)),
        ("sd1.5", ulysses(3), (2, 9, 7)),
        ("sd2 inpainting", ulysses(2), (3, 7, 4)),
        ("sd 4x upscaler", ulysses(3), (1, 10, 5)),
        ("svd", ulysses(2), (3, 7, 6)),
        ("svd", ulysses(4), (6, 8, 3)),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelStrategy) else str(value),
)
def test_every_kind_of_unet_gives_the_answer_of_one_process(name, strategy, size):
    one = reference(name, size)
    for ((worst, sent, notes),) in on_ranks(one, strategy):
        assert worst <= EXACT
        assert sent > 0 and IN_BANDS in notes[0]


NEIGHBOURS = {
    "moments and rows beside": lambda original: (
        lambda mine, sizes, axis, *dim: (
            original(mine, sizes, axis, *dim)
            if mine.dtype != torch.uint8
            else mine.expand(axis.size, -1).contiguous()
        )
    ),
    "keys and values": lambda original: (
        lambda mine, sizes, axis, *dim: (
            original(mine, sizes, axis)
            if mine.dtype == torch.uint8
            else torch.cat([mine[:, :1].expand(-1, size, -1) for size in sizes], *dim)
        )
    ),
}


@pytest.mark.parametrize("missing", [*NEIGHBOURS, "rows of other convolutions"])
def test_a_rank_that_goes_without_the_others_gives_another_answer(missing):
    """Proves that the tolerance is tight enough to show each missing exchange."""
    one = reference("sdxl", (1, 12, 6))

    def apart(world):
        if missing in NEIGHBOURS:
            unet_bands.all_gather = NEIGHBOURS[missing](unet_bands.all_gather)
        else:
            unet_bands.Bands.start_halo = lambda self, x, below=True: lambda: (None, None)
        return one.on_ranks(world, BANDS, Placement(ulysses(2)))[0][0]

    assert min(run_ranks(apart, 2)) > 100 * EXACT


def test_a_residual_that_no_band_is_cut_of_gives_another_answer(monkeypatch):
    one = reference("sdxl + controlnet", (1, 16, 9))
    monkeypatch.setattr(unet_bands, "_cut", lambda residual, rows: None)
    assert min(found[0][0] for found in on_ranks(one, ulysses(2))) > 100 * EXACT


def test_residuals_of_another_size_are_left_out_as_comfyui_leaves_them_out():
    def wrong_size(b, h, w):
        args, kwargs = tiny_inputs("sdxl")(b, h, w)
        residuals = [torch.ones(b, 32, height, w) for height in (h // 2, h + 3, h - 1)]
        return args, kwargs | {"control": {"input": [*residuals, None]}}

    one = Reference(tiny_builder("sdxl"), wrong_size, (1, 12, 6))
    for ((worst, _, _),) in on_ranks(one, ulysses(2)):
        assert worst <= EXACT


def test_rows_that_divide_go_whole_to_each_device():
    one = reference("sd1.5", (2, 8, 6))
    for ((worst, sent, _),) in on_ranks(one, ulysses(2)):
        assert worst <= EXACT
        assert sent == one.answer.nbytes // 2  # its row of the answer


def test_too_few_rows_share_out_attention_and_say_so():
    one = reference("sdxl", (1, 8, 8))
    for ((worst, _, notes),) in on_ranks(one, ulysses(3)):
        assert worst <= EXACT
        assert notes[0].startswith(
            "this image has 2 rows at the lowest resolution of its UNet, too few for bands on 3"
        )


def test_patches_of_attention_see_the_whole_image_and_it_is_said():
    """The patch is like IP-Adapter's: it attends to further keys, weighted by the position in the image."""
    one = Reference(*UNETS["sdxl"], (1, 12, 6))

    def beside(q, k, v, options):
        places = torch.linspace(0, 1, q.shape[1])[None, :, None]
        own = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return own + places * torch.nn.functional.scaled_dot_product_attention(q, k.flip(1), v)

    blocks = {("output", 3): beside, ("middle", 0): beside}
    options = one.kwargs["transformer_options"] = {"patches_replace": {"attn2": blocks}}
    module, regions = one.model.module, one.model.regions
    found = foreign_in(options, NetworkState(module, regions), Foreign())
    mode = mode_of(found, one.kwargs, type(module).__name__, BANDS, bool(regions))
    assert mode == ATTENTION
    plain, one.answer = one.answer, one.alone()
    assert (one.answer - plain).abs().max() > 1e-3 * plain.abs().max()
    for ((worst, _, notes),) in run_ranks(one.on_ranks, 2, mode, Placement(ulysses(2))):
        assert worst <= EXACT and "share out the queries" in notes[0]


def test_a_layer_that_no_rule_covers_shares_out_attention_and_is_named():
    def dilated():
        unet = build_tiny("sdxl")
        unet.input_blocks[1][0].in_layers[2].dilation = (2, 2)
        unet.input_blocks[1][0].in_layers[2].padding = (2, 2)
        return unet

    one = Reference(dilated, tiny_inputs("sdxl"), (1, 12, 6))
    for ((worst, _, notes),) in on_ranks(one, ulysses(2)):
        assert worst <= EXACT and "dilation=(2, 2)" in notes[0] and "share out the queries" in notes[0]


def test_a_call_leaves_the_module_as_it_was():
    """Calls of other sizes, and calls by one rank alone, still work in between."""
    one, other = reference("sdxl", (1, 12, 6)), reference("sdxl", (1, 13, 5))

    def several(world):
        kinds = [type(layer) for layer in one.model.module.modules()]
        found = [
            worst
            for each in (one, other, one)
            for worst, _, _ in each.on_ranks(world, BANDS, Placement(ulysses(2)), Placement())
        ]
        same = (one.alone() - one.answer).abs().max() <= 1e-6 * one.answer.abs().max()
        return [max(found), bool(same) and kinds == [type(layer) for layer in one.model.module.modules()]]

    for worst, unchanged in run_ranks(several, 2):
        assert worst <= EXACT and unchanged
