"""The maths of adapters against peft's own, against the formulas of the papers, and refusals that name the tensor."""

from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import nn

from lora_patches import patch
from parallel_backend.errors import RequestError
from parallel_backend.models.lora_math import apply_patches, check_shapes, cut_rows
from parallel_backend.wire.weight_patches import Factor, WeightPatch

OUT, IN, RANK, ALPHA = 96, 64, 4, 6.0
KEY = "double_blocks.0.img_attn.proj.weight"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def changed(weight, tensors, *patches):
    return apply_patches(weight.clone(), patches, tensors)


def assert_close(found, expected):
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def merged_by_peft(config, weight):
    """peft's layer in place of a linear one, its factors drawn anew, and the weight after peft's own merge."""
    base = nn.Linear(IN, OUT, bias=False)
    base.weight.data = weight.clone()
    (layer,) = inject_adapter_in_model(config, nn.Sequential(base), adapter_name="a")
    for name, parameter in layer.named_parameters():
        if not name.startswith("base_layer"):
            nn.init.normal_(parameter, std=0.3)
    layer.merge()
    return layer, layer.get_base_layer().weight.data


@pytest.mark.parametrize("strength", [1.0, -0.7])
def test_lora_is_pefts(strength):
    weight, tensors = torch.randn(OUT, IN), {}
    layer, merged = merged_by_peft(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"]), weight)
    factors = {"up": layer.lora_B["a"].weight.data, "down": layer.lora_A["a"].weight.data}
    found = changed(weight, tensors, patch(tensors, KEY, "lora", strength, ALPHA, **factors))
    assert_close(found, weight + strength * (merged - weight))


def test_loha_is_pefts():
    weight, tensors = torch.randn(OUT, IN), {}
    layer, merged = merged_by_peft(LoHaConfig(r=RANK, alpha=ALPHA, target_modules=["0"]), weight)
    names = {"w1_a": "hada_w1_a", "w1_b": "hada_w1_b", "w2_a": "hada_w2_a", "w2_b": "hada_w2_b"}
    factors = {role: getattr(layer, name)["a"].data for role, name in names.items()}
    assert_close(changed(weight, tensors, patch(tensors, KEY, "loha", 1.0, ALPHA, **factors)), merged)


@pytest.mark.parametrize("decompose", [False, True], ids=["whole", "low rank"])
def test_lokr_is_pefts(decompose):
    weight, tensors = torch.randn(OUT, IN), {}
    rank = 2 if decompose else 64  # a rank that large leaves both matrices whole
    config = LoKrConfig(r=rank, alpha=ALPHA, decompose_both=decompose, target_modules=["0"])
    layer, merged = merged_by_peft(config, weight)
    names = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")
    found = {name: getattr(layer, f"lokr_{name}") for name in names}
    factors = {name: held["a"].data for name, held in found.items() if "a" in held}
    assert ("w2_a" in factors) == decompose
    # Files of whole matrices carry an alpha that means nothing; peft scales by alpha / rank even so.
    strength = 1.0 if decompose else ALPHA / rank
    assert_close(changed(weight, tensors, patch(tensors, KEY, "lokr", strength, ALPHA, **factors)), merged)


def test_a_small_convolution_between_the_factors_is_multiplied_in():
    weight, tensors = torch.randn(OUT, IN), {}
    up, down, mid = torch.randn(OUT, RANK, 1, 1), torch.randn(RANK, IN, 1, 1), torch.randn(RANK, RANK, 1, 1)
    found = changed(weight, tensors, patch(tensors, KEY, "lora", 1.0, up=up, down=down, mid=mid))
    assert_close(found, weight + up[..., 0, 0] @ mid[..., 0, 0] @ down[..., 0, 0])


@pytest.mark.parametrize("axis", [0, 1], ids=["per output", "per input"])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_dora_takes_its_norms_from_the_magnitude(axis, strength):
    weight, tensors = torch.randn(OUT, IN), {}
    up, down = 0.3 * torch.randn(OUT, RANK), torch.randn(RANK, IN)
    magnitude = torch.rand((OUT, 1) if axis == 0 else (1, IN)) + 0.5
    patches = patch(tensors, KEY, "lora", strength, ALPHA, up=up, down=down, dora_scale=magnitude)
    direction = weight + ALPHA / RANK * up @ down
    # As ComfyUI has it: per output the norm is that of the weight before the change.
    norm = weight.norm(dim=1, keepdim=True) if axis == 0 else direction.norm(dim=0, keepdim=True)
    decomposed = direction * magnitude / norm
    assert_close(changed(weight, tensors, patches), weight + strength * (decomposed - weight))


def test_changes_follow_each_other_and_reach_only_their_part():
    weight, tensors = torch.randn(OUT, IN), {}
    rows = torch.randn(32, IN)
    patches = (
        patch(tensors, KEY, "diff", 2.0, narrow=(0, 32, 32), diff=rows),
        patch(tensors, KEY, "set", 0.0, narrow=(1, 0, 1), value=torch.ones(OUT, 1)),
    )
    expected = weight.clone()
    expected[32:64] += 2 * rows
    expected[:, 0] = 1
    assert changed(weight, tensors, *patches).equal(expected)


def test_halves_change_places_where_the_layout_has_them_the_other_way():
    weight, tensors = torch.zeros(8, 2), {}
    plain = patch(tensors, KEY, "lora", 1.0, up=torch.arange(8.0).reshape(8, 1), down=torch.ones(1, 2))
    swapped = WeightPatch(KEY, "lora", plain.factors, 1.0, swap_halves=True)
    found = changed(weight, tensors, swapped)[:, 0]
    assert found.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("lora", {"up": torch.ones(OUT, 4), "down": torch.ones(5, IN)}),
        ("lora", {"up": torch.ones(OUT + 1, 4), "down": torch.ones(4, IN)}),
        ("lora", {"up": torch.ones(OUT, 4), "down": torch.ones(4, IN, 3, 3)}),
        ("lora", {"up": torch.ones(OUT, 4)}),
        ("loha", {name: torch.ones(4, 4) for name in ("w1_a", "w1_b", "w2_a", "w2_b")}),
        ("lokr", {"w1": torch.ones(5, 5), "w2": torch.ones(7, 7)}),
        ("diff", {"diff": torch.ones(1, IN)}),
        ("set", {"value": torch.ones(OUT + 1, IN)}),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_the_tensors_name_before_anything_is_computed(kind, factors):
    tensors = {}
    change = patch(tensors, KEY, kind, 1.0, **factors)
    for refuse in (
        lambda: check_shapes((OUT, IN), (change,), tensors),
        lambda: apply_patches(torch.zeros(OUT, IN), (change,), tensors),
    ):
        with pytest.raises(
            RequestError, match=r"double_blocks\.0\.img_attn\.proj\.weight has the shape \[96, 64\]"
        ):
            refuse()


@pytest.mark.parametrize(("first", "count"), [(0, 20), (30, 40), (70, 26), (95, 1)])
def test_rows_alone_get_what_they_get_in_the_whole(first, count):
    weight, tensors = torch.randn(OUT, IN), {}
    low = {name: torch.randn(OUT, 3) for name in ("w1_a", "w2_a")}
    low |= {name: torch.randn(3, IN) for name in ("w1_b", "w2_b")}
    patches = (
        patch(tensors, KEY, "lora", 0.5, ALPHA, up=torch.randn(OUT, 4), down=torch.randn(4, IN)),
        patch(tensors, KEY, "lora", 1.0, None, (0, 32, 32), up=torch.randn(32, 4), down=torch.randn(4, IN)),
        patch(tensors, KEY, "loha", -1.0, ALPHA, **low),
        patch(tensors, KEY, "diff", 1.0, narrow=(0, 64, 32), diff=torch.randn(32, IN)),
        patch(tensors, KEY, "set", 1.0, narrow=(0, 0, 8), value=torch.randn(8, IN)),
    )
    rows = weight[first : first + count].clone()
    for change in patches:
        own, factors = cut_rows(change, tensors, first, count, OUT)
        apply_patches(rows, own, factors)
    assert_close(rows, changed(weight, tensors, *patches)[first : first + count])


@pytest.mark.parametrize(
    "change",
    [
        ("lora", {"up": torch.ones(OUT, 4), "down": torch.ones(4, IN), "dora_scale": torch.ones(1, IN)}),
        ("lokr", {"w1": torch.ones(8, 8), "w2": torch.ones(12, 8)}),
        ("set", {"value": torch.ones(1, IN)}),
    ],
    ids=lambda change: change[0],
)
def test_rows_that_depend_on_others_are_not_taken_alone(change):
    tensors, (kind, factors) = {}, change
    assert cut_rows(patch(tensors, KEY, kind, 1.0, **factors), tensors, 0, 10, OUT) is None


@pytest.mark.parametrize(
    ("up", "down", "narrow"),
    [
        ((OUT, 4), (4, IN), ()),
        ((IN, 4), (4, OUT), ()),  # as many values: put into the weight's shape, as ComfyUI does
        ((32, 4), (4, IN), (0, 64, 32)),
        ((OUT, 4), (4, 8), (1, 0, 8)),
        ((OUT, 2, 2), (4, IN), ()),
        ((32, 4), (4, IN), (0, 65, 32)),
        ((32, 4), (4, IN), (0, -1, 32)),
        ((32, 4), (4, IN), (2, 0, 32)),
        ((OUT, 4), (3, IN), ()),
        ((OUT,), (4, IN), ()),
        ((), (), ()),
    ],
    ids=str,
)
def test_the_rule_for_shapes_agrees_with_what_can_be_applied(up, down, narrow):
    tensors = {}
    change = patch(tensors, KEY, "lora", 1.0, None, narrow, up=torch.ones(up), down=torch.ones(down))
    outcomes = []
    for attempt in (
        lambda: check_shapes((OUT, IN), (change,), tensors),
        lambda: apply_patches(torch.zeros(OUT, IN), (change,), tensors),
    ):
        try:
            attempt()
            outcomes.append("fits")
        except RequestError:
            outcomes.append("refused")
    assert len(set(outcomes)) == 1, outcomes


def test_a_factor_that_was_not_sent_is_refused():
    with pytest.raises(RequestError, match="missing"):
        apply_patches(torch.zeros(OUT, IN), (WeightPatch(KEY, "diff", (Factor("diff", "aa"),), 1.0),), {})
