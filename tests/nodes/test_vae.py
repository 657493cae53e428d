"""Latents in the form that is sent to the ranks, and the checks of a VAE before anything is sent."""

import gc
from types import SimpleNamespace

import pytest
import torch

from comfy_modules import CPU
from other_vaes import BANDED, TILED, build
from pack_nodes import module_fixture
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.tiny.weights import random

node = module_fixture("nodes.job.vae")


def vae_of(case, network=None):
    network = build(case) if network is None else network
    return SimpleNamespace(
        first_stage_model=network, device=CPU, vae_dtype=torch.float32, latent_channels=case.channels
    )


@pytest.mark.parametrize(
    ("name", "shape", "as_sent"),
    [
        ("stable video diffusion", (5, 4, 2, 3), lambda latent: latent.transpose(0, 1)[None]),
        ("seedvr2", (2, 16 * 3, 2, 3), lambda latent: latent.reshape(2, 16, 3, 2, 3)),
        ("ltx", (1, 128, 2, 2, 3), lambda latent: latent),
        ("taesd", (1, 4, 2, 2, 3), lambda latent: latent),
    ],
)
def test_frames_that_come_as_a_batch_or_among_channels_are_set_apart(node, name, shape, as_sent):
    latent = random(*shape)
    assert torch.equal(node.as_sent(vae_of(BANDED[name]), latent), as_sent(latent))


def test_only_a_network_that_cuts_tiles_is_said_to(node):
    assert node.cuts_tiles(vae_of(TILED)) and not node.cuts_tiles(vae_of(BANDED["taesd"]))


def test_sound_stays_on_one_device_and_is_said_to(node):
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    network = torch.nn.Module()
    network.__class__ = AudioVAE
    with pytest.raises(node.CannotBeSplit, match="sound is decoded on one device"):
        node.check_splittable(vae_of(TILED, network), encodes=False)
    node.refuse_other_kinds(vae_of(TILED, network))


@pytest.mark.parametrize("case", [*BANDED.values(), TILED], ids=[*BANDED, "tiled"])
def test_a_vae_is_unchanged_as_comfyui_builds_it(node, case):
    assert not node._is_changed(build(case))


def test_a_replaced_method_is_a_change_and_one_that_comfyui_has_put_back_is_none(node):
    network = build(BANDED["taesd"])
    layer = next(one for one in network.modules() if isinstance(one, torch.nn.Conv2d))
    layer.forward = layer.forward
    assert "forward" in vars(layer) and not node._is_changed(network)
    layer.forward = lambda x: x
    assert node._is_changed(network)


class OnAGpu(torch.Tensor):
    """A tensor that, like one on a GPU, cannot be stacked with tensors of the host."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.stack and {type(one) for one in args[0]} != {cls}:
            raise RuntimeError("Expected all tensors to be on the same device")
        found = super().__torch_function__(function, types, args, kwargs)
        return found.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else found


@pytest.fixture
def marked(node, monkeypatch):
    """Returns a function that ships a VAE and gives its number: a new one if it must be sent to the ranks again."""
    from comfy.model_patcher import ModelPatcher

    monkeypatch.setattr(
        node.Shipment, "__init__", lambda self, *_: setattr(self, "_job", SimpleNamespace(replaced=[]))
    )

    def number(network, *, encodes=False):
        vae = vae_of(BANDED["taesd"], network)
        vae.vae_dtype, vae.patcher = torch.bfloat16, ModelPatcher(network, CPU, CPU)
        shipment = node.VaeShipment(vae, torch.zeros(1), (), encodes=encodes)
        return shipment._hold(node._half(network, ("taesd_encoder",))).number

    return number


def test_a_vae_of_which_comfyui_has_a_part_on_its_gpu_is_the_same_vae(marked):
    """Dynamic VRAM leaves small parameters on the GPU, in the compute dtype."""
    network = build(BANDED["taesd"])
    before = marked(network)
    small = [module for module in network.modules() if getattr(module, "bias", None) is not None]
    for module in small:
        module.bias = torch.nn.Parameter(module.bias.detach().bfloat16().as_subclass(OnAGpu), False)
    assert small and marked(network) == before
    small[-1].bias.data[0] += 1
    assert marked(network) != before


def test_ranks_keep_a_vae_as_long_as_comfyui_has_it(node, marked):
    network, other = build(BANDED["taesd"]), build(BANDED["taesd"])
    numbers = {marked(network), marked(network, encodes=True), marked(other)}
    assert len(numbers) == 3 and numbers <= set(node.held_numbers())
    del network
    gc.collect()
    assert len(numbers & set(node.held_numbers())) == 1


def test_more_pixels_than_can_be_sent_are_refused_in_words_before_anything_is(node, marked):
    vae = vae_of(BANDED["taesd"])
    vae.patcher = SimpleNamespace(load_device=CPU)
    pixels = torch.zeros(1, 1, 1, 1).expand(2**19, 3, 64, 64)  # 24 GiB by shape, without memory
    with pytest.raises(RequestError, match=r"take 24.0 GiB, and at most 8.0 GiB can be sent"):
        node.VaeShipment(vae, pixels, (), encodes=True).run(SimpleNamespace(devices=("cpu:0",)), None)
