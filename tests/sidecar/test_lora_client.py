"""LoRAs from the caller's side, on real ranks: sent once, swapped without a load, failing without a trace."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from differences import relative_difference
from fault_injection import fault
from flux_requests import flux_request
from lora_patches import H, lora, merge, patch
from parallel_backend.errors import Cancelled, OutOfMemory, RequestError
from parallel_backend.requests import ModelSpec, Placement, PredictRequest
from parallel_backend.sidecar import lora_client
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.weight_patches import RECENT_SETS, WeightPatches
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5
TWO = Placement(ParallelStrategy(ulysses_degree=2))
SLICED = Placement(ParallelStrategy(tensor_degree=2))
PROJ = "double_blocks.0.img_attn.proj.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    base = write_tiny_flux(folder / "tiny.safetensors")
    merged = merge(base, folder / "merged.safetensors", lora()[1])
    return ModelSpec(str(base)), ModelSpec(merged)


@pytest.fixture
def ranks(two_real_ranks):
    two_real_ranks.sleep(2)  # no model, no factors
    return two_real_ranks


def sample(ranks, spec, patches=None, placement=TWO):
    options = {} if patches is None else {"patches": patches}
    return ranks.sample(spec, flux_request(), placement, **options).latent


def test_a_lora_gives_what_a_merged_file_gives_and_goes_without_a_trace(ranks, files):
    spec, merged = files
    expected, (patches, _) = sample(ranks, merged), lora()
    bare, pids = sample(ranks, spec), ranks.pids
    for placement in (TWO, SLICED):
        found = sample(ranks, spec, patches, placement)
        assert relative_difference(found, expected) <= TOLERANCE < relative_difference(bare, expected)
        call = PredictRequest(flux_request().noise, torch.tensor([0.5]), flux_request().positive)
        one, _ = ranks.predict(spec, call, placement, patches=patches)
        two, _ = ranks.predict(spec, call, placement)
        assert relative_difference(one, two) > 1e-2
    assert sample(ranks, spec).equal(bare)
    assert ranks.pids == pids


def test_a_change_of_strength_loads_nothing_and_sends_no_factor_again(ranks, files):
    spec, _ = files
    full, half, other = lora()[0], lora(strength=0.5)[0], lora(seed=1)[0]
    first = ranks.load(spec, TWO.strategy, patches=full)
    assert not first.cached and first.patched.touched == first.patched.weights == 10
    assert first.patched.bytes_sent == sum(t.nbytes for t in full.tensors.values())
    again = ranks.load(spec, TWO.strategy, patches=full)
    assert again.cached and again.patched.cached and again.patched.weights == 10
    weaker = ranks.load(spec, TWO.strategy, patches=half)
    assert weaker.cached and not weaker.patched.cached
    assert weaker.patched.bytes_sent == 0
    assert weaker.patched.touched == 10
    both = WeightPatches((*half.patches, *other.patches), {**half.tensors, **other.tensors})
    assert ranks.load(spec, TWO.strategy, patches=both).patched.bytes_sent > 0
    assert ranks.load(spec, TWO.strategy, patches=full).patched.bytes_sent == 0
    bare = ranks.load(spec, TWO.strategy)
    assert bare.cached and bare.patched.touched == 10 and bare.patched.weights == 0


def test_factors_that_no_recent_set_uses_are_sent_again(ranks, files):
    spec, _ = files
    for seed in range(RECENT_SETS + 1):
        assert ranks.load(spec, TWO.strategy, patches=lora(seed=seed)[0]).patched.bytes_sent > 0
    assert ranks.load(spec, TWO.strategy, patches=lora(seed=1)[0]).patched.bytes_sent == 0
    assert ranks.load(spec, TWO.strategy, patches=lora(seed=0)[0]).patched.bytes_sent > 0


def test_many_factors_go_in_several_payloads(ranks, files, monkeypatch):
    spec, merged = files
    expected = sample(ranks, merged)
    monkeypatch.setattr(lora_client, "CHUNK_BYTES", 20_000)
    assert relative_difference(sample(ranks, spec, lora()[0]), expected) <= TOLERANCE


@pytest.mark.parametrize("strategy", [TWO.strategy, SLICED.strategy], ids=lambda s: s.describe())
def test_a_lora_that_cannot_be_applied_leaves_the_weights_of_before(ranks, files, strategy):
    spec, _ = files
    good, _ = lora()
    placement = Placement(strategy)
    expected, pids = sample(ranks, spec, good, placement), ranks.pids
    for factors, words in (
        (
            {"diff": torch.ones(H, H + 1)},
            r"double_blocks\.0\.img_attn\.proj\.weight has the shape \[256, 256\]",
        ),
        ({"diff": torch.full((H, H), 3e38)}, r"double_blocks\.0\.img_attn\.proj\.weight infinite or NaN"),
    ):
        tensors = dict(lora(seed=2)[0].tensors)
        worse = (*lora(seed=2)[0].patches, *(patch(tensors, PROJ, "diff", 2.0, **factors) for _ in range(2)))
        with pytest.raises(RequestError, match=words):
            sample(ranks, spec, WeightPatches(worse, tensors), placement)
        info = ranks.load(spec, strategy, patches=good)
        assert info.cached and info.patched.cached
        assert sample(ranks, spec, good, placement).equal(expected)
    assert ranks.pids == pids


def test_memory_that_ends_on_one_rank_leaves_the_group_usable(no_leaks, files):
    spec, _ = files
    ranks = Sidecar(("cpu:0", "cpu:1"), rank_module="tests.support.rank_programs.short_of_memory_patch_rank")
    try:
        good = lora(strength=0.5)[0]
        expected, pids = sample(ranks, spec, good), ranks.pids
        with pytest.raises(OutOfMemory, match="Rank 1 ran out of memory"):
            sample(ranks, spec, lora(strength=7.0)[0])
        assert sample(ranks, spec, good).equal(expected)
        assert ranks.pids == pids
    finally:
        ranks.stop()


def test_a_cancel_before_the_change_leaves_a_state_that_the_next_request_sets_right(ranks, files):
    spec, _ = files
    good, bare = lora()[0], sample(ranks, spec)
    expected, cancelled = sample(ranks, spec, good), []
    assert sample(ranks, spec).equal(bare)

    def stop(phase):
        cancelled.append(phase)
        if "LoRA" in phase:
            ranks.cancel()

    with pytest.raises(Cancelled):
        ranks.load(spec, TWO.strategy, patches=lora(seed=4)[0], on_phase=stop)
    assert "applying LoRAs" in cancelled
    assert sample(ranks, spec, good).equal(expected)
    assert sample(ranks, spec).equal(bare)


def test_a_lora_is_back_after_a_crash_a_restart_and_a_sleep(two_real_ranks, files, tmp_path):
    spec, _ = files
    good, _ = lora()
    expected = sample(two_real_ranks, spec, good)
    for level in (2, 1):
        two_real_ranks.sleep(level)
        assert sample(two_real_ranks, spec, good).equal(expected)
    with fault("kill", "step", step=2, once=tmp_path / "fired"):
        ranks = Sidecar(("cpu:0", "cpu:1"))
        try:
            resumed = ranks.sample(spec, flux_request(), TWO, patches=good)
            os.kill(ranks.pids[1], signal.SIGKILL)
            assert sample(ranks, spec, good).equal(expected)
        finally:
            ranks.stop()
    assert (tmp_path / "fired").exists() and any("failed" in note for note in resumed.info.notes)
    assert resumed.latent.equal(expected)
