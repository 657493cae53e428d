"""Weights of ComfyUI's own modules under LoRAs: bit for bit those of ComfyUI's ModelPatcher, and the file's again."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_changes import BIAS, FINAL, LINEAR, MLP, NORM, PROJ, QKV, changes, random
from comfy_modules import import_comfyui_here
from comfy_weight_files import CONTEXT, CPU, FORMATS, HIDDEN, OLD, patch, spec, write
from dispatch_counter import DEVICE, counted, world_of_one_process
from mapped_files import mapped_ranges
from module_devices import comfyui_on_the_device
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.placing import place
from parallel_backend.models.comfyui.weights import PREFIX, ComfyUIWeights
from parallel_backend.models.tensor_pieces import take_apart

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def stock_entries(found, tensors):
    """The same, as ComfyUI's own reading of a LoRA file has them: (patches by key, strength, base strength)."""
    import comfy.lora
    import comfy.utils

    file_names = {
        "lora": {"up": "lora_up.weight", "down": "lora_down.weight", "dora_scale": "dora_scale"},
        "loha": {role: f"hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b")},
        "lokr": {"w1": "lokr_w1", "w2": "lokr_w2"},
    }
    for change in found:
        factors = {f.role: tensors[f.digest] for f in change.factors}
        if change.kind in ("diff", "set"):
            (factor,) = factors.values()
            value = (change.kind, (factor,))
        else:
            file = {f"x.{file_names[change.kind][role]}": factor for role, factor in factors.items()}
            if change.alpha is not None:
                file["x.alpha"] = torch.tensor(change.alpha)
            (value,) = comfy.lora.load_lora(file, {"x": "y"}, log_missing=False).values()
        key = PREFIX + change.key
        if change.swap_halves:
            key = (key, None, comfy.utils.swap_scale_shift)
        elif change.narrow:
            key = (key, change.narrow)
        yield {key: value}, change.strength, change.base_strength


def stock(path, form, found, tensors):
    """The module of ComfyUI's own loader, patched by its own ModelPatcher."""
    import comfy.sd

    options = {"dtype": DTYPES[form]} if form in DTYPES else {}
    patcher = comfy.sd.load_diffusion_model(str(path), model_options=options)
    for entry, strength, base_strength in stock_entries(found, tensors):
        assert patcher.add_patches(entry, strength, base_strength)
    patcher.patch_model(device_to=CPU)
    return patcher.model.diffusion_model


def bits(module):
    return {
        name: [piece.reshape(-1).view(torch.uint8).clone() for piece in take_apart(p)[0]]
        for name, p in module.named_parameters()
    }


def differing(one, other):
    assert one.keys() == other.keys()
    return {n for n in one if not all(a.equal(b) for a, b in zip(one[n], other[n], strict=True))}


def views(module, path):
    """Where parameters lie, of those that lie in the mapped file."""
    ranges = mapped_ranges(path)
    places = {name: take_apart(p)[0][0].data_ptr() for name, p in module.named_parameters()}
    return {n: place for n, place in places.items() if any(low <= place < high for low, high in ranges)}


@pytest.mark.parametrize("form", [*DTYPES, *FORMATS, OLD])
def test_changed_weights_are_those_of_comfyuis_model_patcher_bit_for_bit(tmp_path, form):
    path = write(tmp_path / "model.safetensors", form)
    found, tensors = changes()
    model = load(spec(path), CPU)
    before, places = bits(model.module), views(model.module, path)
    model.weights.check(found, tensors)
    assert model.weights.apply(found, tensors) == 7
    assert not {QKV, PROJ, MLP, LINEAR} & views(model.module, path).keys()
    wanted = bits(stock(path, form, found, tensors))
    assert differing(bits(model.module), wanted) == set()
    assert differing(before, wanted) == {QKV, PROJ, MLP, LINEAR, BIAS, NORM, FINAL}, "stock changes these"
    assert model.weights.apply(found, tensors) == 0, "they are in place"
    assert model.weights.apply((), {}) == 7
    assert differing(bits(model.module), before) == set()
    assert views(model.module, path) == places, "views of the file again"
    assert {QKV, PROJ, MLP, LINEAR} <= places.keys()
    assert form not in DTYPES or places.keys() == before.keys(), "all are, where ComfyUI casts none"


def test_a_file_in_another_dtype_than_its_own_is_changed_in_that_one(tmp_path):
    path = write(tmp_path / "model.safetensors", "bf16")
    found, tensors = changes()
    model = load(spec(path, weight_dtype="float8_e4m3fn"), CPU)
    before = bits(model.module)
    assert model.module.get_parameter(QKV).dtype == torch.float8_e4m3fn
    assert differing(before, bits(stock(path, "fp8", [], {}))) == set()
    assert model.weights.apply(found, tensors) == 7
    assert differing(bits(model.module), bits(stock(path, "fp8", found, tensors))) == set()
    assert model.weights.apply((), {}) == 7
    assert differing(bits(model.module), before) == set()


def test_only_tensors_whose_changes_differ_are_computed_anew(tmp_path):
    path = write(tmp_path / "model.safetensors", "float8_e4m3fn")
    found, tensors = changes()
    one, two = found[:3], found[2:]  # PROJ is in both
    model = load(spec(path), CPU)
    assert model.weights.apply(one, tensors) == 2
    proj = model.module.get_parameter(PROJ)
    assert model.weights.apply(two, tensors) == 1 + 5, "QKV is restored, the others come"
    assert model.module.get_parameter(PROJ) is proj
    fresh = load(spec(path), CPU)
    fresh.weights.apply(two, tensors)
    assert differing(bits(model.module), bits(fresh.module)) == set()


def test_what_does_not_fit_is_refused_by_the_tensors_name_and_changes_nothing(tmp_path):
    model = load(spec(write(tmp_path / "model.safetensors", "float8_e4m3fn")), CPU)
    tensors = {}
    narrow = patch(tensors, QKV, "lora", 1.0, up=random(3 * HIDDEN, 4), down=random(4, CONTEXT + 1))
    with pytest.raises(RequestError, match=QKV):
        model.weights.check([narrow], tensors)
    with pytest.raises(RequestError, match=r"double_blocks\.9.*Flux does not have"):
        model.weights.check([patch(tensors, "double_blocks.9.x", "diff", 1.0, diff=random(4))], tensors)
    with pytest.raises(RequestError, match=f"change of {BIAS} was not sent"):
        model.weights.check([patch({}, BIAS, "diff", 1.0, diff=random(3 * HIDDEN))], {})


@pytest.mark.parametrize("form", ["bf16", "float8_e4m3fn"])
def test_a_change_that_gives_nan_leaves_the_weights_of_before(tmp_path, form):
    model = load(spec(write(tmp_path / "model.safetensors", form)), CPU)
    found, tensors = changes()
    model.weights.apply(found, tensors)
    before = bits(model.module)
    endless = patch(tensors, MLP, "diff", 1e38, diff=1e38 * torch.ones(4 * HIDDEN, HIDDEN))
    with pytest.raises(RequestError, match=f"{MLP} infinite or NaN"):
        model.weights.apply([*found[:2], endless], tensors)
    assert differing(bits(model.module), before) == set()
    assert model.weights.apply(found, tensors) == 0


def test_parameters_that_comfyui_leaves_alone_stay_alone():
    """Wan's blocks have one beside their layers, and ComfyUI's ModelPatcher takes leaves only."""
    import_comfyui_here()
    import comfy.model_patcher
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    width = {"dim": 96, "ffn_dim": 192, "freq_dim": 32, "text_dim": 48, "num_heads": 4, "num_layers": 1}
    wan = WanModel(
        in_dim=16,
        out_dim=16,
        **width,
        dtype=torch.float32,
        device=CPU,
        operations=comfy.ops.disable_weight_init,
    )
    for parameter in wan.requires_grad_(False).parameters():
        parameter.fill_(0.5)
    beside, leaf = "blocks.0.modulation", "blocks.0.ffn.0.bias"
    holder = nn.Module()
    holder.diffusion_model = wan
    other = copy.deepcopy(holder)
    patcher = comfy.model_patcher.ModelPatcher(other, CPU, CPU)
    shapes = {name: wan.get_parameter(name).shape for name in (beside, leaf)}
    assert patcher.add_patches({PREFIX + name: ("diff", (torch.ones(s),)) for name, s in shapes.items()})
    patcher.patch_model(device_to=CPU)

    weights = ComfyUIWeights(comfy.model_patcher.ModelPatcher(holder, CPU, CPU), {})
    tensors = {}
    found = [patch(tensors, name, "diff", 1.0, diff=torch.ones(s)) for name, s in shapes.items()]
    assert weights.apply(found, tensors) == 1
    assert differing(bits(wan), bits(other.diffusion_model)) == set()
    assert wan.get_parameter(leaf).max() == 1.5
    assert wan.get_parameter(beside).max() == 0.5


def test_a_module_on_another_device_gets_what_is_made_of_the_host_s_copy():
    """As on a GPU: the file's values stay in host memory, and the module's parameter is a new one on the device."""
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)
    stored, seen = module.weight, []

    def patch_weight_to_device(key, device_to):
        seen.append((key, device_to.type, module.weight is stored))
        module.weight = nn.Parameter(
            torch.empty(4, 4, dtype=torch.int8, device=device_to), requires_grad=False
        )

    patcher = SimpleNamespace(
        model=SimpleNamespace(diffusion_model=module),
        load_device=torch.device("meta"),
        patches={},
        backup={},
        patch_weight_to_device=patch_weight_to_device,
    )
    import_comfyui_here()
    weights, tensors = ComfyUIWeights(patcher, {}), {}
    weights.apply([patch(tensors, "weight", "diff", 1.0, diff=torch.ones(4, 4))], tensors)
    assert seen == [("diffusion_model.weight", "meta", True)]
    assert module.weight.device.type == "meta"
    assert weights.apply((), {}) == 1
    assert module.weight.device.type == "meta"
    assert stored.device == CPU


@pytest.mark.parametrize("form", ["fp32", "fp8"])
def test_changes_are_computed_on_the_device_and_so_is_what_is_taken_back(tmp_path, form):
    """On a stand-in for a GPU, which refuses to compute with the host's tensors."""
    model = load(spec(write(tmp_path / "model.safetensors", form)), CPU)
    place(model.patcher.model, DEVICE, {}, None)
    model.patcher.load_device = DEVICE
    found, tensors = changes()
    with world_of_one_process(0, 1), comfyui_on_the_device(), counted():
        assert model.weights.apply(found, tensors) == len({change.key for change in found})
        there = [piece.device for p in model.module.parameters() for piece in take_apart(p)[0]]
        assert model.weights.apply((), {}) and set(there) == {DEVICE}
    assert {piece.device for p in model.module.parameters() for piece in take_apart(p)[0]} == {DEVICE}
