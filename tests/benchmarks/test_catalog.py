"""Published model families: token counts against their pipelines, and closed forms of memory and of bytes sent."""

import pytest
from catalog import FAMILIES, guess_family, split_name
from catalog_model import CatalogModel, estimate_memory
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.machine.cards import CARDS
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.step_bounds import bytes_sent, lower_bound
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ParallelStrategy


def catalog_job(name="flux1-dev", storage=2.0, **job):
    return Job(CatalogModel(FAMILIES[name], storage, ComputeOptions()), **job)


FLUX = catalog_job()


def _strategy(**degrees):
    return ParallelStrategy(**{f"{name}_degree": value for name, value in degrees.items()})


def estimate(job, strategy):
    return estimate_memory(job, strategy).private_bytes


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
    assert FAMILIES[name].image_tokens(*size) == tokens


@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if f.is_transformer and f.blocks[0].attends == "joint"]
)
def test_the_blocks_account_for_most_of_the_published_parameters(name):
    """Counts the blocks' linear weights (a joint block has two sets). The rest is modulation, embedders, refiners."""
    family = FAMILIES[name]
    own = sum(b.count * (b.image_weights + (b.text_weights if b.reduces == 2 else 0)) for b in family.blocks)
    if name.startswith(("cogvideox", "z-image", "lumina2")):  # text and image use the same layers
        own = sum(b.count * b.image_weights for b in family.blocks)
    assert 0.5 < own / family.parameters < 1.15


def test_cross_attention_keeps_the_text_at_home():
    wan = catalog_job("wan14b", width=832, height=480, frames=81)
    assert bytes_sent(wan, _strategy(ulysses=2)) == pytest.approx(
        40 * 4 * wan.image_tokens / 2 * 5120 * 2 / 2
    )


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
    cfg=st.sampled_from([1, 2]),
    split=st.sampled_from(["ulysses", "ring", "tensor", "pipefusion"]),
    degree=st.sampled_from([1, 2, 4]),
)
def test_no_bound_lies_below_perfect_scaling(name, card, cfg, split, degree):
    family = FAMILIES[name]
    if not family.is_transformer:
        degree = 1
    width, height, frames = family.default_size
    job = catalog_job(name, width=width, height=height, frames=frames, prompts=2)
    strategy = _strategy(cfg=cfg, **{split: degree})
    alone = lower_bound(job, ParallelStrategy(), CARDS[card])
    assert lower_bound(job, strategy, CARDS[card]) >= alone / strategy.world_size * 0.999
    assert estimate(job, strategy) > 0


def test_models_are_found_by_alias_and_storage():
    assert guess_family("FLUX1-fp8").name == "flux1-dev"
    assert split_name("hunyuanvideo-q4") == ("hunyuanvideo", "q4")
    assert guess_family("wan14b-lingbot").name == "wan14b"
    assert not guess_family("something-new").known
