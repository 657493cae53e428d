"""Adjustments that ranks need in single VAE networks; tests/engine/bands/ proves what these compute afterwards."""

import pytest
import torch

from other_vaes import BANDED, TILED, build
from parallel_backend.errors import PlatformError
from parallel_backend.models.comfyui.rows.vae_adjustments import adjust, reproducible

pytestmark = pytest.mark.usefixtures("comfyui_here")


@pytest.mark.parametrize(
    ("kind", "what"),
    [(BANDED["ltx"], "run_up"), (BANDED["seedvr2"], "set_memory_limit"), (TILED, "_decode_pixels")],
)
def test_another_version_of_comfyui_is_said_to_be_one(monkeypatch, kind, what):
    """After this error, ComfyUI decodes without the ranks."""
    network = build(kind)
    monkeypatch.delattr(type(network.decoder if what == "run_up" else network), what)
    with pytest.raises(PlatformError, match="in another way than the pack knows"):
        adjust(network, torch.float32)


def test_frames_that_are_cut_otherwise_are_seen():
    network = build(BANDED["ltx"])
    network.decoder.run_up = lambda idx, sample_ref, chunks: None
    with pytest.raises(PlatformError, match="cuts frames otherwise"):
        adjust(network, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.bfloat16, "zeros"), (torch.float32, "replicate")], ids=str
)
def test_where_comfyui_pads_with_zeros_for_cudnns_sake_so_do_ranks(monkeypatch, dtype, mode):
    import comfy.ops

    monkeypatch.setattr(comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", True)
    network = build(BANDED["mochi"])
    adjust(network, dtype)
    modes = {
        layer.padding_mode for layer in network.modules() if getattr(layer, "kernel_size", None) == (3, 3, 3)
    }
    assert modes == {mode}


def test_noise_within_layers_is_drawn_alike_on_unlike_cards():
    """The CPU's generator draws it for any device: CUDA's numbers depend on the card's count of multiprocessors."""
    network, cpu = build(BANDED["ltx with noise"]), torch.device("cpu")
    adjust(network, torch.float32)
    layer = next(layer for layer in network.modules() if getattr(layer, "inject_noise", False))

    def drawn(device=cpu):
        return layer._feed_spatial_noise(
            torch.zeros(1, 2, 1, 3, 4, device=device), torch.ones(2, 1, 1, device=device)
        )

    with reproducible(network, cpu):
        first, second = drawn(), drawn()
    with reproducible(network, cpu):
        assert drawn("meta").is_meta
        assert torch.equal(drawn(), second) and not torch.equal(first, second)
