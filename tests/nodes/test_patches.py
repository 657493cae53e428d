"""Patches of a model taken apart for the ranks and made again there: two ranks give what the patched model gives."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy_modules import import_comfyui_here
from dispatch_counter import DEVICE
from module_devices import as_in_a_rank, forward_of, on_device, watched
from pack_nodes import import_node_module
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui import patches as carried
from parallel_backend.models.comfyui.run_memory import RunMemory
from parallel_backend.models.comfyui.tiny import image, video
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill, random
from parallel_backend.models.proof.states import PROVEN_HERE
from parallel_backend.requests import ATTENTION, BLOCK, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.arguments import pack_arguments, unpack_arguments
from ranks import run_ranks

EXACT = 1e-5  # of the largest value
STRATEGIES = (ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2))


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    import_comfyui_here()


class VAE:
    """Of a ControlNet: its encoder gives a small latent of any image [B, H, W, 3]."""

    def __init__(self, frames: bool) -> None:
        self.frames = frames

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels):
        batch, height, width, _ = pixels.shape
        drawn = random(batch, 16, height // 8, width // 8, seed=round(float(pixels.mean()) * 1000))
        return drawn.unsqueeze(2) if self.frames else drawn


def _patcher(network):
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    return ModelPatcher(fill(network), cpu, cpu)


def _made():
    import comfy.ops

    return {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}


def _blockwise(batch=1):
    """Qwen-Image's ControlNet by blocks; the image has another size than the latent."""
    from comfy_extras.nodes_model_patch import DiffSynthCnetPatch, QwenImageBlockWiseControlNet

    network = QwenImageBlockWiseControlNet(num_layers=4, dim=128, **_made())
    patch = DiffSynthCnetPatch(_patcher(network), VAE(True), random(batch, 40, 80, 3).sigmoid(), 0.7)
    return {"double_block": [patch]}


def _fun(**changes):
    """Z-Image's ControlNet, of as many layers as divide its 30 blocks."""
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy_extras.nodes_model_patch import ZImageControlPatch

    network = ZImage_Control(
        dim=256, n_heads=8, n_kv_heads=8, multiple_of=32, ffn_dim_multiplier=1.0, **changes, **_made()
    )
    patch = ZImageControlPatch(_patcher(network), VAE(False), random(1, 64, 80, 3).sigmoid(), 0.7)
    return {"noise_refiner": [patch], "double_block": [patch]}


def _lllite(batch=1):
    from comfy.ldm.anima import lllite

    width, embedded = 96, 16
    found = {
        "lllite_conditioning1.conv1.weight": (8, 3, 4, 4),
        "lllite_conditioning1.conv3.weight": (16, 8, 4, 4),
    }
    found |= {"lllite_conditioning1.proj.weight": (embedded, 16, 1, 1)}
    for name in ("blocks_0_self_attn_q_proj", "blocks_1_cross_attn_q_proj", "blocks_1_mlp_layer1"):
        found[f"lllite_dit_{name}.down.weight"] = (8, width)
        found[f"lllite_dit_{name}.cond_to_film.weight"] = (16, embedded)
    shapes = {name: torch.empty(shape) for name, shape in found.items()}
    patch = lllite.AnimaLLLitePatch(
        _patcher(lllite.AnimaLLLite(shapes, {}, **_made())),
        random(batch, 64, 80, 3).sigmoid(),
        None,
        0.7,
        1.0,
        0.0,
    )
    self_attention = {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"}
    return {
        "post_input": [patch],
        "attn1_patch": [lllite.AnimaLLLiteAttentionPatch(patch, self_attention)],
        "attn2_patch": [lllite.AnimaLLLiteAttentionPatch(patch, {"q": "cross_attn_q_proj"})],
        "mlp_patch": [lllite.AnimaLLLiteMLPPatch(patch)],
    }


_REFINES = {"n_control_layers": 15, "additional_in_dim": 17, "refiner_control": True}
CASES = {  # (model, its inputs, patches, how its tokens are shared out)
    "DiffSynthCnetPatch": (image.qwen, image.qwen_inputs, _blockwise, BLOCK),
    "ZImageControlPatch": (image.zimage, image.zimage_inputs, lambda: _fun(n_control_layers=15), BLOCK),
    "ZImageControlPatch, union": (image.zimage, image.zimage_inputs, lambda: _fun(**_REFINES), BLOCK),
    "ZImageControlPatch, broken": (image.zimage, image.zimage_inputs, lambda: _fun(broken=True, **_REFINES), BLOCK),
    "AnimaLLLitePatch": (video.anima, video.anima_inputs, _lllite, ATTENTION),
    "AnimaLLLitePatch, two images": (video.anima, video.anima_inputs, lambda: _lllite(2), ATTENTION),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_two_ranks_give_what_the_patched_model_gives(name):
    build, inputs, patched, tokens = CASES[name]
    model = TinyModel(fill(build()))
    args, kwargs = inputs(2, 8, 10)
    stock, plain = (_stock(model, args, kwargs, patches) for patches in (patched(), {}))
    call = _call(type(model.module).__name__, args, kwargs, patched())
    assert call.tokens == tokens
    for strategy in STRATEGIES:
        for answer in run_ranks(_answer, 2, model, call, strategy):
            assert (answer - stock).abs().max() <= EXACT * stock.abs().max()
    assert (plain - stock).abs().max() > 100 * EXACT * stock.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_patches_compute_on_a_ranks_device_without_waiting_for_it(name):
    build, inputs, patched, _ = CASES[name]
    model = on_device(TinyModel(build()))
    call = _call(type(model.module).__name__, *inputs(2, 8, 10), patched())
    args, kwargs = as_in_a_rank(call.args, call.kwargs)
    with forward_of(model, STRATEGIES[0], 1) as forward:
        found = watched(lambda: forward(ModuleCall(args, kwargs, call.rows, call.tokens)))
    assert found.own == [] and found.drawn == []
    assert [answer.device for answer in found.answers] == [DEVICE]


def _stock(model, args, kwargs, patches):
    options = {"patches": patches, "sigmas": torch.tensor([0.5]), "cond_or_uncond": [0, 1]}
    return model.module(*copy.deepcopy(args), **copy.deepcopy(kwargs), transformer_options=options)


def _call(name, args, kwargs, patches):
    """As it arrives at a rank."""
    arguments = import_node_module("nodes.model.arguments")
    own = import_node_module("nodes.model.patches").CarriedPatches()
    options = {"patches": patches, "sigmas": torch.tensor([0.5]), "cond_or_uncond": [0, 1]}
    made = arguments.module_call(name, PROVEN_HERE, args, kwargs | {"transformer_options": options}, own)
    args, kwargs = unpack_arguments(pack_arguments((made.args, made.kwargs)))
    return ModuleCall(args, kwargs, made.rows, made.tokens)


@torch.inference_mode()
def _answer(world, model, call, strategy):
    return make_module_forward(model, Layouts(world), Placement(strategy))(copy.deepcopy(call))


def _built(memory=None, **changes):
    empty = {"patches": {}, "objects": [], "networks": [], "skipped": [], "replaced": [], "run": None}
    return carried.live_options(empty | changes, memory or RunMemory(), torch.nn.Linear(1, 1))


def test_a_block_that_is_left_out_gives_what_it_was_given():
    (skip,) = _built(skipped=[["double_block", 3]])["patches_replace"]["dit"].values()
    given = {"img": torch.ones(2)}
    assert skip(given, {}) is given


def test_no_class_but_those_of_the_table_is_made():
    patch = {"class": "Popen", "values": {}, "network": None, "compression": None, "of": None}
    with pytest.raises(RequestError, match="no patch 'Popen'"):
        _built(objects=[patch])
    for source, name in (("subprocess", "Popen"), ("comfy.ops", "torch"), ("comfy.ops", "manual_cast.Popen")):
        part = {"class": (source, name), "values": {}, "tensors": {}, "absent": [], "children": {}}
        with pytest.raises(RequestError, match=r"no .* in "):
            _built(networks=[{"parts": [part], "weights": {}}])


def test_what_a_run_left_is_asked_for_in_its_order_or_refused():
    memory, run = RunMemory(), {"kind": "references", "number": 5, "call": 0}
    first = memory.enter(run, None)
    assert memory.enter(run | {"call": 1}, None) is first
    for number, call in ((5, 1), (5, 3), (6, 2)):  # made before, one is missing, another run's
        with pytest.raises(RequestError, match="Run the prompt again"):
            memory.enter(run | {"number": number, "call": call}, None)
    assert memory.enter({**run, "number": 6}, None) is not first
    memory.clear()
    with pytest.raises(RequestError, match="Run the prompt again"):
        memory.enter({**run, "number": 6, "call": 1}, None)


def test_a_patch_of_another_pack_is_left_to_be_refused_by_name():
    patches = import_node_module("nodes.model.patches")

    class UsoStyleProjectorPatch:  # of the same name
        pass

    options = {
        "patches": {"post_input": [UsoStyleProjectorPatch()]},
        "patches_replace": {"dit": {("double_block", 0): print}},
    }
    left = patches.without_carried(options)
    assert left["patches"]["post_input"] and left["patches_replace"]["dit"]
    assert not patches.without_carried({"patches": _lllite()})["patches"]["post_input"]


def test_what_patches_hold_is_counted_once():
    weights, image = torch.zeros(10), torch.zeros(3, dtype=torch.bfloat16)
    tree = {
        "networks": [{"weights": {"float32": weights}}],
        "objects": [{"values": {"image": image, "again": image}}],
    }
    assert carried.held_bytes(tree) == 46 and carried.held_bytes(None) == 0


def test_runs_that_take_turns_keep_their_numbers():
    own, one, other = import_node_module("nodes.model.patches").CarriedPatches(), {}, {}
    numbers = [own._next_call(mark) for mark in (one, other, one, other)]
    assert [call for _, call in numbers] == [0, 0, 1, 1]
    assert numbers[0][0] == numbers[2][0] != numbers[1][0] == numbers[3][0]


def test_a_rank_keeps_one_copy_of_a_patchs_weights():
    from parallel_backend.rank.kept_arguments import KeptArguments
    from parallel_backend.sidecar.tensor_cache import KnownTensors
    from parallel_backend.wire.arguments import kept_tensors

    known, rank = KnownTensors(), KeptArguments(torch.device("cpu"))
    weights, prompt, small = torch.ones(8192), torch.zeros(8192), torch.ones(2)
    places = []
    for _ in range(2):
        given = {"context": prompt, carried.ARGUMENT: {"weights": weights, "image": small}}
        sent = known.take_out(given)
        payload = pack_arguments(((), sent.kwargs)) | kept_tensors(sent.new)
        _, kwargs = rank.take(payload, known.take_forgotten())
        places.append((kwargs[carried.ARGUMENT]["weights"].data_ptr(), kwargs["context"].data_ptr()))
        assert torch.equal(kwargs[carried.ARGUMENT]["image"], small)
        (kept,) = (one for one in rank._kept.values() if one.data_ptr() == places[-1][0])
        assert torch.equal(kept, weights)
    assert places[0][0] == places[1][0] and not sent.new
