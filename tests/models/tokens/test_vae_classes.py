"""Every network that this ComfyUI makes a VAE of has a state here, and what is sent of one is enough to build it."""

import ast
import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from comfy_modules import CPU, import_comfyui_here
from parallel_backend.models.comfyui.rows.vae_halves import _parameters_assigned
from parallel_backend.models.tokens.vae_networks import (
    NETWORKS,
    Way,
    decoding_tensors,
    encodes_in_bands,
    encoding_tensors,
    known,
    told_beside,
)

DOCS = Path(__file__).parents[3] / "docs" / "vae-decode.md"
_KL = "comfy.ldm.modules.diffusionmodules.model.Decoder"


@pytest.fixture(scope="module", autouse=True)
def comfyui():
    return import_comfyui_here()


def made_by_comfyui():
    """(class of the network, class of its decoder where that is told apart) of each `first_stage_model` in sd.py."""
    import comfy.sd

    for node in ast.walk(ast.parse(Path(comfy.sd.__file__).read_text())):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.targets[0]) != "self.first_stage_model":
            continue
        if ast.unparse(node.value.func) == "self.first_stage_model.eval":
            continue
        kind = attrgetter(ast.unparse(node.value.func))(comfy.sd)
        configs = {word.arg: ast.unparse(word.value) for word in node.value.keywords}
        target = re.match(r"\{'target': '([\w.]+)'", configs.get("decoder_config", ""))
        name = f"{kind.__module__}.{kind.__qualname__}"
        yield name, target[1] if target else _KL if name.endswith(".AutoencoderKL") else ""


def test_every_class_has_a_state():
    found = set(made_by_comfyui())
    assert len(found) > 20
    lacking = {
        (network, decoder)
        for network, decoder in found
        if not any(decoder in (each.decoder, "") for each in NETWORKS.get(network, ()))
    }
    assert not lacking, (
        f"comfy/sd.py makes VAEs of {sorted(lacking)}: give each a state in models/tokens/vae_networks.py"
    )


def test_a_class_without_a_state_is_seen():
    """The same walk, with one taken out."""
    found = {network for network, _ in made_by_comfyui()}
    assert found - set(NETWORKS) == set()
    assert found - (set(NETWORKS) - {"comfy.ldm.genmo.vae.model.VideoVAE"})


def test_each_state_is_told_whole():
    for entries in NETWORKS.values():
        for entry in entries:
            assert bool(entry.reason) == (entry.way in (Way.ONE_DEVICE, Way.REFUSED))
            assert bool(entry.decoder) == (entry.way is Way.BANDS)


def test_the_docs_list_each():
    words = "bands|tiles|one device|refused"
    rows = re.findall(rf"^\| (.+?) \| ({words}) \| ({words}|–) \|", DOCS.read_text(), re.M)
    nothing_to_encode = {Way.REFUSED: "–"}
    assert sorted(rows) == sorted(
        (
            entry.models,
            entry.way.value,
            "bands" if entry.encoder else nothing_to_encode.get(entry.way, "one device"),
        )
        for entries in NETWORKS.values()
        for entry in entries
    )


def networks():
    """In the sizes of the real ones, which nobody fills with numbers."""
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX
    from comfy.ldm.genmo.vae.model import VideoVAE as Mochi
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE as Ltx
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE
    from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper
    from comfy.taesd.taehv import TAEHV
    from comfy.taesd.taesd import TAESD

    return {
        "cogvideox": AutoencoderKLCogVideoX,
        "mochi": Mochi,
        **{f"ltx {version}": lambda version=version: Ltx(version=version) for version in (0, 1, 2)},
        "minimax h3": MiniMaxH3VideoVAE,
        "seedvr2": VideoAutoencoderKLWrapper,
        **{f"taehv {channels}": lambda c=channels: TAEHV(c) for channels in (16, 32, 48, 128)},
        **{f"taesd {channels}": lambda c=channels: TAESD(latent_channels=c) for channels in (4, 16, 128)},
        "cosmos": None,
        "svd": None,
    }


def built(tensors, told="{}"):
    import comfy.sd

    with _parameters_assigned():
        vae = comfy.sd.VAE(sd=dict(tensors), device=CPU, dtype=torch.float32, metadata=json.loads(told))
    return vae.first_stage_model


def first(name):
    """The network as ComfyUI makes it of a whole file."""
    if name == "cosmos":
        return built({"decoder.unpatcher3d.wavelets": torch.tensor([0.5, 0.5])})
    if name == "svd":
        return built({"decoder.mid.block_1.mix_factor": torch.zeros(1)})
    return networks()[name]()


@pytest.mark.parametrize(
    "name",
    [
        "cogvideox",
        "cosmos",
        "ltx 0",
        "ltx 1",
        "ltx 2",
        "minimax h3",
        "mochi",
        "seedvr2",
        "svd",
        *(f"taehv {channels}" for channels in (16, 32, 48, 128)),
        *(f"taesd {channels}" for channels in (4, 16, 128)),
    ],
)
def test_what_is_sent_tells_comfyui_which_network_it_is(name):
    # Cosmos' asks for a number while it is built, and SVD's has numbers in its decoder.
    with torch.device("cpu" if name in ("cosmos", "svd") else "meta"):
        network = first(name)
        channels = int(name.split()[-1]) if name.startswith("taesd") else 16
        again = built(decoding_tensors(network), told_beside(network, channels) or "{}")
    assert type(again) is type(network)
    found = known(network)
    assert known(again) is found and found.way in (Way.BANDS, Way.TILES)
    shapes = [
        {key: tuple(value.shape) for key, value in decoding_tensors(each).items()}
        for each in (network, again)
    ]
    assert shapes[0] == shapes[1]


def test_what_is_sent_of_an_encoder_tells_comfyui_which_network_it_is():
    """SVD's, whose other half tells it from Flux's; tests/rank and tests/comfy build more."""
    network = first("svd")
    again = built(encoding_tensors(network))
    assert known(again) is known(network) and encodes_in_bands(again)
    held = {name for name, _ in again.encoder.named_parameters(prefix="encoder")}
    assert held and held <= set(encoding_tensors(network))
