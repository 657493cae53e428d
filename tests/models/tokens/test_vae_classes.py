"""Every network that this ComfyUI uses as a VAE has an entry in models/tokens/vae_networks.py."""

import ast
import re
from operator import attrgetter
from pathlib import Path

import pytest

from parallel_backend.models.tokens.vae_networks import NETWORKS, VaeMode

DOCS = Path(__file__).parents[3] / "docs" / "vae-decode.md"
_KL = "comfy.ldm.modules.diffusionmodules.model.Decoder"
pytestmark = pytest.mark.usefixtures("comfyui_here")


def made_by_comfyui():
    """Yields (class of the network, class of its decoder or "" for any) of each `first_stage_model` in sd.py."""
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
    assert len(found) > 20 and "comfy.ldm.genmo.vae.model.VideoVAE" in {network for network, _ in found}
    lacking = {
        (network, decoder)
        for network, decoder in found
        if not any(decoder in (each.decoder, "") for each in NETWORKS.get(network, ()))
    }
    assert not lacking, (
        f"comfy/sd.py makes VAEs of {sorted(lacking)}: give each a state in models/tokens/vae_networks.py"
    )


def test_each_state_is_told_whole():
    for entries in NETWORKS.values():
        for entry in entries:
            assert bool(entry.reason) == (entry.way in (VaeMode.ONE_DEVICE, VaeMode.REFUSED))
            assert bool(entry.decoder) == (entry.way is VaeMode.BANDS)


def test_the_docs_list_each():
    words = "bands|tiles|one device|refused"
    rows = re.findall(rf"^\| (.+?) \| ({words}) \| ({words}|–) \|", DOCS.read_text(), re.M)
    nothing_to_encode = {VaeMode.REFUSED: "–"}
    assert sorted(rows) == sorted(
        (
            entry.models,
            entry.way.value,
            "bands" if entry.encoder else nothing_to_encode.get(entry.way, "one device"),
        )
        for entries in NETWORKS.values()
        for entry in entries
    )
