"""The sheet's arithmetic against closed forms, and its bound against what must hold on any hardware."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import catalog_job, flux_job
from parallel_backend.errors import RequestError
from parallel_backend.machine.cards import CARDS, LINKS, find_card, find_link
from parallel_backend.models.catalog import FAMILIES, find_family, guess_family, split_name
from parallel_backend.planner.memory.estimate import estimate_memory
from parallel_backend.planner.sheet import bytes_sent, compute_share, lower_bound
from parallel_backend.strategy import ParallelStrategy

FLUX = catalog_job()
TOKENS, HIDDEN, BLOCKS = 4096 + 512, 3072, 57


def _strategy(**degrees):
    return ParallelStrategy(**{f"{name}_degree": value for name, value in degrees.items()})


def estimate(job, strategy):
    return estimate_memory(job, strategy).private_bytes


def _sent(job, **degrees):
    return bytes_sent(job, _strategy(**degrees))


def test_flux_takes_74_teraflop_a_step():
    linear, attention = FLUX.flop_parts
    assert linear / 1e12 == pytest.approx(59.49, abs=0.01)
    assert attention / 1e12 == pytest.approx(14.87, abs=0.01)
    assert FLUX.flop / 1e12 == pytest.approx(74.4, abs=0.05)
    assert linear == 2 * BLOCKS * 12 * HIDDEN**2 * TOKENS
    assert attention == 4 * BLOCKS * HIDDEN * TOKENS**2


def test_cfg_and_batch_multiply_the_work():
    assert replace(FLUX, batch=3, prompts=2).flop == 6 * FLUX.flop


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("flux1-dev", (1024, 1024, 1), 4096),
        ("flux1-dev", (1000, 1000, 1), 63 * 63),
        ("hunyuanvideo", (1280, 720, 129), 118_800),
        ("wan14b", (832, 480, 81), 32_760),
        ("cogvideox5b", (720, 480, 49), 17_550),
        ("wan2.2-5b", (1280, 704, 121), 27_280),
    ],
)
def test_tokens_are_those_of_the_published_pipelines(name, size, tokens):
    assert find_family(name).image_tokens(*size) == tokens


@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if f.is_transformer and f.blocks[0].attends == "joint"]
)
def test_the_blocks_account_for_most_of_the_published_parameters(name):
    """Linear weights of the blocks (a joint block has two sets); the rest is modulation, embedders, text refiners."""
    family = find_family(name)
    own = sum(b.count * (b.image_weights + (b.text_weights if b.reduces == 2 else 0)) for b in family.blocks)
    if name.startswith(("cogvideox", "z-image", "lumina2")):  # one stream
        own = sum(b.count * b.image_weights for b in family.blocks)
    assert 0.5 < own / family.parameters < 1.15


@pytest.mark.parametrize("ulysses", [2, 4, 8])
def test_ulysses_sends_four_tensors_but_for_its_own_share(ulysses):
    per_layer = 4 * TOKENS / ulysses * HIDDEN * 2 * (ulysses - 1) / ulysses
    assert _sent(FLUX, ulysses=ulysses) == pytest.approx(BLOCKS * per_layer)


@pytest.mark.parametrize("ring", [2, 4])
def test_ring_passes_keys_and_values_on(ring):
    assert _sent(FLUX, ring=ring) == pytest.approx(BLOCKS * 2 * (ring - 1) * TOKENS / ring * HIDDEN * 2)


def test_the_forms_are_those_of_the_engine():
    """What engine/traffic.py counts per rank, there with element_size 2 and without the last gathers."""
    traffic = pytest.importorskip("tests.closed_forms.traffic")
    for ulysses, ring in ((2, 1), (4, 1), (1, 2), (2, 2), (1, 4)):
        strategy = ParallelStrategy(ulysses_degree=ulysses, ring_degree=ring)
        counted = traffic.expected_bytes(
            strategy, 0, rows=1, text=512, image=4096, layers=BLOCKS, hidden=HIDDEN, latent_elements=0,
            patch_channels=0, element_size=2,
        )  # fmt: skip
        assert bytes_sent(FLUX, strategy) == pytest.approx(counted)


def test_tensor_parallelism_reduces_twice_in_a_double_and_once_in_a_single_block():
    assert _sent(FLUX, tensor=4) == pytest.approx((2 * 19 + 38) * 2 * 3 / 4 * TOKENS * HIDDEN * 2)


def test_pipefusion_sends_activations_once_and_sharding_sends_weights():
    assert _sent(FLUX, pipefusion=4) == TOKENS * HIDDEN * 2
    sharded = ParallelStrategy(ulysses_degree=4, shard_weights=True)
    weights = bytes_sent(FLUX, sharded) - _sent(FLUX, ulysses=4)
    assert weights == pytest.approx(FLUX.model.weight_bytes * 3 / 4)


def test_cfg_moves_next_to_nothing():
    job = replace(FLUX, prompts=2)
    assert _sent(job, cfg=2) < _sent(job, ulysses=2) / 100


def test_cross_attention_keeps_the_text_at_home():
    wan = catalog_job("wan14b", width=832, height=480, frames=81)
    assert _sent(wan, ulysses=2) == pytest.approx(40 * 4 * wan.image_tokens / 2 * 5120 * 2 / 2)


def test_what_does_not_divide_costs_the_busiest_rank():
    flux3 = replace(FLUX, batch=3)
    assert compute_share(flux3, _strategy(data=2)) == pytest.approx(2 / 3)
    z_image = catalog_job("z-image")
    assert compute_share(z_image, _strategy(ulysses=4)) == pytest.approx(32 / 30 / 4, rel=1e-3)
    assert compute_share(FLUX, _strategy(pipefusion=4)) == pytest.approx(15 / 57)


def test_no_step_goes_below_the_cards_peak_its_memory_or_the_link():
    card, small = CARDS["h100"], catalog_job(width=64, height=64, text=1)
    assert lower_bound(FLUX, ParallelStrategy(), card) == FLUX.flop / 989e12
    assert lower_bound(small, ParallelStrategy(), card) == FLUX.model.weight_bytes / 3350e9
    slow = replace(LINKS["pcie3"], rate=0.1)
    ulysses = _strategy(ulysses=4)
    assert lower_bound(FLUX, ulysses, card, slow) == bytes_sent(FLUX, ulysses) / 0.1e9
    # Weights in fp8 may be multiplied in fp8.
    assert lower_bound(catalog_job(storage=1.0), ParallelStrategy(), card) == FLUX.flop / 2 / 989e12


def test_a_flux_file_has_the_work_of_its_family():
    bf16 = flux_job()
    assert bf16.flop / 1e12 == pytest.approx(74.36, abs=0.01)
    assert bf16.model.weight_bytes == pytest.approx(23.8e9)
    assert bf16.model.family.parameters == pytest.approx(find_family("flux1-dev").parameters, rel=0.02)


def test_memory_is_divided_only_by_what_divides_weights():
    whole = estimate(FLUX, ParallelStrategy())
    assert whole > FLUX.model.weight_bytes == 11.9e9 * 2
    assert estimate(FLUX, _strategy(ulysses=4)) > FLUX.model.weight_bytes
    for degrees in ({"tensor": 4}, {"pipefusion": 4}):
        assert estimate(FLUX, _strategy(**degrees)) < FLUX.model.weight_bytes / 2
    sharded = ParallelStrategy(ulysses_degree=4, shard_weights=True)
    assert estimate(FLUX, sharded) < FLUX.model.weight_bytes / 2
    assert estimate(catalog_job(storage=1.0), ParallelStrategy()) == pytest.approx(whole - 11.9e9)


@given(
    name=st.sampled_from(sorted(FAMILIES)),
    card=st.sampled_from(sorted(CARDS)),
    link=st.sampled_from(sorted(LINKS)),
    cfg=st.sampled_from([1, 2]),
    split=st.sampled_from(["ulysses", "ring", "tensor", "pipefusion"]),
    degree=st.sampled_from([1, 2, 4]),
)
def test_no_bound_lies_below_perfect_scaling_or_above_what_more_links_allow(
    name, card, link, cfg, split, degree
):
    family = find_family(name)
    if not family.is_transformer:
        degree = 1
    width, height, frames = family.default_size
    job = catalog_job(name, width=width, height=height, frames=frames, prompts=2)
    strategy = _strategy(cfg=cfg, **{split: degree})
    alone = lower_bound(job, ParallelStrategy(), CARDS[card])
    bound = lower_bound(job, strategy, CARDS[card], LINKS[link])
    assert bound >= alone / strategy.world_size * 0.999
    assert bound >= lower_bound(job, strategy, CARDS[card], replace(LINKS[link], rate=1e6)) > 0
    assert estimate(job, strategy) > 0


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("rtx4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("L40S", "l40s"),
        ("Tesla T4", "t4"),
    ],
)
def test_cards_are_known_as_the_driver_writes_them(written, card):
    assert find_card(written).name == card


@pytest.mark.parametrize("name", ["RTX 9999", "A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_an_unknown_card_is_refused_with_the_known_ones(name):
    with pytest.raises(RequestError, match="rtx4090"):
        find_card(name)


def test_links_are_the_cards_own_unless_named():
    assert find_link("nvlink", CARDS["a100"]).rate == 300
    assert find_link("nvlink", CARDS["a6000"]).rate == 56 + 32  # a bridge, and PCIe beside it
    assert find_link("pcie", CARDS["h100"]).rate == 64 and find_link("pcie4", CARDS["h100"]).rate == 32
    with pytest.raises(RequestError, match="no NVLink"):
        find_link("nvlink", CARDS["rtx4090"])
    with pytest.raises(RequestError, match="pcie4"):
        find_link("token ring", CARDS["h100"])


def test_models_are_found_by_alias_and_storage():
    assert find_family("FLUX1-fp8").name == "flux1-dev"
    assert split_name("hunyuanvideo-q4") == ("hunyuanvideo", "q4")
    assert guess_family("wan14b-lingbot").name == "wan14b"
    assert not guess_family("something-new").known
    with pytest.raises(RequestError, match="flux1-dev"):
        find_family("something-new")
