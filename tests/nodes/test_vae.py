"""Latents as they are sent to the ranks, and what of a VAE is said before anything is sent."""

from types import SimpleNamespace

import pytest
import torch

from comfy_modules import CPU, import_comfyui_here
from other_vaes import BANDED, TILED, build
from pack_nodes import import_node_module
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.tiny.weights import random


@pytest.fixture(scope="module")
def node():
    import_comfyui_here()
    return import_node_module("nodes.model.vae")


def vae_of(case, network=None):
    network = build(case) if network is None else network
    return SimpleNamespace(
        first_stage_model=network, device=CPU, vae_dtype=torch.float32, latent_channels=case.channels
    )


def test_the_frames_of_a_video_that_come_as_a_batch_are_one_latent(node):
    latent = random(5, 4, 2, 3)
    sent = node.as_sent(vae_of(BANDED["stable video diffusion"]), latent)
    assert torch.equal(sent, latent.transpose(0, 1)[None])


def test_the_frames_of_a_video_that_come_among_channels_are_set_apart(node):
    """As SeedVR2's own network reads them."""
    latent = random(2, 16 * 3, 2, 3)
    sent = node.as_sent(vae_of(BANDED["seedvr2"]), latent)
    assert torch.equal(sent, latent.reshape(2, 16, 3, 2, 3))


@pytest.mark.parametrize("name", ["ltx", "taesd"])
def test_any_other_latent_is_sent_as_it_is(node, name):
    latent = random(1, BANDED[name].channels, 2, 2, 3)
    assert node.as_sent(vae_of(BANDED[name]), latent) is latent


def test_the_noise_of_a_latent_is_what_its_network_would_draw(node):
    network = build(BANDED["ltx with noise"])
    network.timestep_conditioning, network.decode_noise_scale = True, 0.5
    latent, seen = random(1, 128, 2, 2, 3), []
    torch.manual_seed(3)
    sent = node.as_sent(vae_of(BANDED["ltx with noise"], network), latent)
    network.decoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    torch.manual_seed(3)
    with torch.inference_mode():
        network.decode(latent)
    assert torch.equal(network.per_channel_statistics.un_normalize(sent), seen[0])
    assert (sent - latent).abs().max() > 0.1


def test_only_a_network_that_cuts_tiles_is_said_to(node):
    assert node.cuts_tiles(vae_of(TILED)) and not node.cuts_tiles(vae_of(BANDED["taesd"]))


def test_sound_stays_on_one_device_and_is_said_to(node):
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    network = torch.nn.Module()
    network.__class__ = AudioVAE
    with pytest.raises(RequestError, match="sound is decoded on one device"):
        node.decoder_weights(vae_of(TILED, network))
    node.refuse_other_kinds(vae_of(TILED, network))


class OnAGpu(torch.Tensor):
    """As torch has it, does not go together with tensors of the host."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.stack and {type(one) for one in args[0]} != {cls}:
            raise RuntimeError("Expected all tensors to be on the same device")
        found = super().__torch_function__(function, types, args, kwargs)
        return found.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else found


def test_a_vae_of_which_comfyui_has_a_part_on_its_gpu_is_the_same_vae(node):
    """As dynamic VRAM leaves it: small parameters there, in the dtype that they are computed with."""
    import comfy.sd

    network, vae = build(BANDED["taesd"]), comfy.sd.VAE.__new__(comfy.sd.VAE)
    vars(vae).update(vars(vae_of(BANDED["taesd"], network)), vae_dtype=torch.bfloat16)
    vae.patcher = SimpleNamespace(patches={}, object_patches={})
    before = node.decoder_weights(vae)
    small = [module for module in network.modules() if getattr(module, "bias", None) is not None]
    for module in small:
        module.bias = torch.nn.Parameter(module.bias.detach().bfloat16().as_subclass(OnAGpu), False)
    assert small and node.decoder_weights(vae).identity == before.identity
    small[-1].bias.data[0] += 1
    assert node.decoder_weights(vae).identity != before.identity
