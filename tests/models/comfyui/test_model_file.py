"""Facts from the header of a file of any family: bytes and lists of blocks, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.errors import CheckpointError
from parallel_backend.models.comfyui.formats.stored_weights import CountedBlocks, by_stages
from parallel_backend.models.comfyui.model_file import TYPICAL, LatentSizes, UNetFacts, inspect
from parallel_backend.models.dtypes import Dtypes
from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.candidates import Candidate, enumerate_candidates, rank_candidates
from parallel_backend.planner.plan import job_from_latent
from parallel_backend.planner.rules import StrategySettings, resolve_strategy
from parallel_backend.planner.step_bounds import compute_share
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.memory import predict_memory
from parallel_backend.planner.workload.workload import Job
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS
from parallel_backend.strategy import ParallelStrategy

IN_BLOCK, AROUND = 64 * 64 + 64 * 256 + 2 * 64, 16 * 64 + 2 * 64 * 64
ONE = ParallelStrategy()
CELLS = LatentSizes(channels=16, patch=(1, 1, 1))  # of a UNet, whose tokens are cells


@pytest.fixture
def path(tmp_path):
    """A file with three blocks of two matrices and two norms, embedders around them, and a VAE next to the model."""
    tensors = {"model.diffusion_model.patch_embedding.weight": torch.zeros(64, 16, dtype=torch.bfloat16)}
    for layer in (0, 2):  # of an embedder
        name = f"model.diffusion_model.text_embedding.{layer}.weight"
        tensors[name] = torch.zeros(64, 64, dtype=torch.bfloat16)
    for block in range(3):
        name = f"model.diffusion_model.blocks.{block}"
        tensors[f"{name}.q.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
        tensors[f"{name}.ffn.weight"] = torch.zeros(256, 64, dtype=torch.bfloat16)
        for norm in ("norm1", "norm2"):
            tensors[f"{name}.{norm}.weight"] = torch.zeros(64, dtype=torch.bfloat16)
    tensors["first_stage_model.decoder.blocks.0.weight"] = torch.zeros(512, 512)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def file(path):
    """The facts of `path` once its class is known: a video model of 4 heads."""
    latent = LatentSizes(channels=16, patch=(1, 2, 2))
    return replace(inspect(path), model="WAN21", module="WanModel", heads=4, latent=latent)


def with_weights(file, **changes):
    return replace(file, weights=replace(file.weights, **changes))


def job(file, shape=(1, 16, 5, 8, 12), **options):
    return job_from_latent(CheckpointModel(file), shape, text=7, **{"has_cfg": False, "steps": 2, **options})


def held(file, strategy=ONE, rank=0, on_cpu=False):
    dtypes = Dtypes.of("auto", file.dtype, on_cpu=on_cpu)
    return file.held_weights(dtypes, strategy, rank, on_cpu=on_cpu)


def activations(job, strategy=ONE, **options):
    return predict_memory(job, strategy, **options)[0].activations


def largest(job, strategy):
    """Returns the private bytes of the fullest rank."""
    return max(memory.private_bytes for memory in predict_memory(job, strategy))


def auto(job, count):
    """Returns what `auto` decides for a job on `count` devices."""
    return resolve_strategy(StrategySettings(), job, tuple(f"cpu:{n}" for n in range(count)))


def test_the_header_tells_blocks_bytes_and_dtype(path):
    found = inspect_model(str(path), "comfyui")
    assert found.weights.blocks == (CountedBlocks("blocks", 3, 2 * IN_BLOCK, 2 * 64 * 256),)
    assert found.tensor_bytes == 2 * (3 * IN_BLOCK + AROUND), "what lies beside the model does not count"
    assert (found.dtype, found.width, found.name) == ("bfloat16", 64, "model.safetensors")


def test_a_model_whose_blocks_lie_deeper_or_that_has_none_has_a_size_too(tmp_path):
    deep = {
        f"model.model.transformer.layers.{n}.{i}.weight": torch.zeros(8, 8)
        for n in range(2)
        for i in range(4)
    }
    save_file(deep, tmp_path / "deep.safetensors")
    assert inspect(tmp_path / "deep.safetensors").weights.blocks == (
        CountedBlocks("transformer.layers", 2, 1024, 256),
    )
    save_file({"conv.weight": torch.zeros(8, 8)}, tmp_path / "flat.safetensors")
    assert inspect(tmp_path / "flat.safetensors").weights.blocks == (CountedBlocks("the model", 1, 256, 256),)


def test_a_number_that_the_header_lacks_refuses_nothing(path):
    shape = inspect(path).shape
    assert ParallelStrategy(ulysses_degree=7).violations(shape, 7) == []


def test_a_file_without_weights_of_a_known_dtype_is_refused(tmp_path):
    save_file({"counts": torch.zeros(3, dtype=torch.int64)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors is refused: it holds no weights"):
        inspect(tmp_path / "x.safetensors")


def test_the_stand_in_for_no_file_has_every_size():
    memory = predict_memory(job(TYPICAL, (1, 16, 128, 128)), ONE)[0]
    assert memory.weights == TYPICAL.tensor_bytes and memory.activations > 0


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((2, 16, 8, 12), 4 * 6),
        ((1, 16, 5, 8, 12), 5 * 4 * 6),
        ((1, 64, 21), 11),
        ((1, 16, 5, 7, 11), 5 * 4 * 6),
    ],
)
def test_latents_of_images_videos_and_sound_have_their_tokens(file, shape, tokens):
    """A sound's latent is one row of positions; a patch of 2 x 2 takes two of them."""
    found = job(file, shape)
    assert (found.image_tokens, found.batch) == (tokens, shape[0])


@pytest.mark.parametrize("pixels", [8, 16, 32])
def test_a_picture_is_as_large_as_its_latents_cells(file, pixels):
    """A latent cell has 8 pixels a side in most models, 16 in Flux.2, 32 in LTX. The work does not depend on that."""
    found = job(replace(file, latent=replace(file.latent, pixels=pixels)), (1, 16, 8, 12))
    assert (found.height, found.width) == (8 * pixels, 12 * pixels)
    assert (found.latent_size, found.image_tokens) == ((8, 12), 4 * 6)
    assert found.flop == job(file, (1, 16, 8, 12)).flop
    larger = Job(found.model, width=1024, height=1024)
    assert larger.latent_size == (1024 // pixels, 1024 // pixels)


def test_each_rank_holds_the_whole_or_its_share(file):
    whole = held(file, ParallelStrategy(ulysses_degree=2))
    assert whole.private == file.tensor_bytes and not whole.sharded
    shared = held(file, ParallelStrategy(ulysses_degree=2, shard_weights=True))
    assert shared.private == pytest.approx(file.tensor_bytes / 2, abs=8) and shared.sharded
    mapped = held(file, on_cpu=True)
    assert (mapped.private, mapped.mapped) == (0, file.tensor_bytes)


def test_a_rank_that_slices_layers_holds_its_part_of_the_blocks_and_all_around(file):
    sliced = ParallelStrategy(tensor_degree=2)
    whole, half = held(file), held(file, sliced)
    assert half.around == whole.around
    assert half.private - half.around.private == pytest.approx(
        (whole.private - whole.around.private) / 2, abs=8
    )
    both = held(file, sliced.replace(cfg_degree=2, shard_weights=True))
    assert both.sharded and both.private == pytest.approx(half.private / 2, abs=8)
    work = job(file, (1, 16, 5, 64, 64))
    assert activations(work) / 2 < activations(work, sliced) < activations(work)


def test_classes_that_are_not_described_and_packed_files_have_no_slices(file):
    names = ("", "Flux", "LTXVModel", "UNetModel")
    assert [replace(file, module=name).shape.splits_layers for name in names] == [True, True, False, False]
    assert not replace(file, module="Flux", mode=ROWS).shape.splits_layers
    assert not with_weights(replace(file, module="Flux"), dtype="Q8_0").shape.splits_layers


def test_fp8_that_comfyui_keeps_in_halves_takes_twice_the_memory_on_a_gpu(file):
    """ComfyUI does that if the card cannot multiply fp8 and 16-bit weights fit."""
    stored = with_weights(file, dtype="float8_e4m3fn")

    def parts(kept, on_cpu):
        return held(with_weights(stored, fp8_loaded_as=kept), on_cpu=on_cpu).parts

    one, twice = parts("", on_cpu=False), parts("bfloat16", on_cpu=False)
    assert [part.private for part in twice] == [2 * part.private for part in one]
    assert any(part.cast for part in one) and not any(part.cast for part in twice)
    assert parts("bfloat16", on_cpu=True) == parts("", on_cpu=True)


def test_more_frames_and_fewer_ranks_need_more_memory(file):
    short, long = (job(file, (1, 16, frames, 64, 64)) for frames in (5, 10))
    assert activations(long) == pytest.approx(2 * activations(short), rel=0.01)
    assert activations(short, ParallelStrategy(ulysses_degree=2)) < activations(short)


def test_auto_shares_out_tokens_where_they_can_be_and_rows_where_not(file):
    shared = auto(job(file), 3)
    assert shared.strategy == ParallelStrategy(ulysses_degree=3), "4 heads over 3 ranks"
    whole = replace(file, mode=ROWS)
    for has_cfg, batch, wanted in (
        (True, 1, ParallelStrategy(cfg_degree=2)),
        (False, 2, ParallelStrategy(data_degree=2)),
        (True, 4, ParallelStrategy(data_degree=3)),
        (False, 1, ONE),
    ):
        decision = auto(job(whole, (batch, 16, 1, 8, 8), has_cfg=has_cfg), 3)
        assert decision.strategy == wanted
        assert "cannot be shared out" in decision.reason


def test_attention_alone_is_shared_out_where_it_takes_a_third_of_the_arithmetic(file):
    """It does so for a video of a model whose blocks are not described, and for a large image of a UNet."""
    unknown = replace(file, mode=ATTENTION)
    attention = job(replace(unknown, unet=UNetFacts())).model.family.image_flop / 8
    unet = replace(unknown, unet=UNetFacts(attention))
    for model, shape, wanted in (
        (unknown, (1, 16, 1, 8, 8), ONE),
        (unknown, (1, 16, 5, 64, 64), ParallelStrategy(ulysses_degree=3)),
        (unet, (1, 16, 128, 128), ONE),
        (unet, (1, 16, 256, 256), ParallelStrategy(ulysses_degree=3)),
    ):
        work = job(model, shape)
        decision = auto(work, 3)
        assert decision.strategy == wanted
        assert (wanted in enumerate_candidates(work, 3)) and ("share out its queries" in decision.reason) == (
            wanted != ONE
        )
    both = auto(job(unet, (1, 16, 256, 256), has_cfg=True), 4)
    assert both.strategy == ParallelStrategy(cfg_degree=2, ulysses_degree=2)


def test_by_hand_attention_is_shared_out_whatever_it_takes_and_all_else_is_done_alike(file):
    unknown = replace(file, mode=ATTENTION)
    ulysses, work = ParallelStrategy(ulysses_degree=2), job(unknown, (1, 16, 5, 64, 64))
    assert ulysses.violations(unknown.shape, 2) == []
    assert ulysses.violations(replace(unknown, mode=ROWS).shape, 2)
    settings = StrategySettings("manual", "cpu:4", ulysses.replace(cfg_degree=2))
    decision = resolve_strategy(settings, work, tuple(f"cpu:{n}" for n in range(4)))
    assert decision.strategy == ulysses, "cfg_degree would idle, and does not become more of what seldom pays"
    assert compute_share(work, ulysses) == pytest.approx(1 - work.attention_share / 2)
    # Each device holds the activations of all tokens.
    assert largest(work, ulysses) >= largest(work, ONE)


def test_a_unet_has_bands_as_far_as_its_rows_go_beside_cfg(file):
    """Four rows of the latent are one row at the UNet's lowest resolution."""
    unet = replace(file, heads=0, mode=BANDS, unet=UNetFacts(band_rows=4), latent=CELLS)
    for shape, has_cfg, wanted in (
        ((1, 4, 64, 64), False, ParallelStrategy(ulysses_degree=4)),
        ((1, 4, 64, 64), True, ParallelStrategy(cfg_degree=2, ulysses_degree=2)),
        ((1, 4, 9, 64), False, ParallelStrategy(ulysses_degree=3)),
        ((1, 4, 4, 64), False, ONE),
    ):
        work = job(unet, shape, has_cfg=has_cfg)
        decision = auto(work, 4)
        found = enumerate_candidates(work, 4)
        assert decision.strategy == wanted and wanted in found
        assert max(c.ulysses_degree for c in found) == min(4, -(-shape[2] // 4))
    assert decision.reason.startswith("one device")
    assert compute_share(job(unet, (1, 4, 36, 64)), ParallelStrategy(ulysses_degree=2)) == pytest.approx(
        5 / 9
    )
    large = job(unet, (1, 4, 1024, 1024))
    assert largest(large, ParallelStrategy(ulysses_degree=2)) < largest(large, ONE)


def test_on_the_cpu_attention_holds_its_scores_before_and_after_their_softmax(file):
    """The job has 5 x 4 x 6 video tokens, 7 text tokens and 4 heads. Ring's kernel and a GPU's store no scores."""
    work, tokens = job(file, (1, 16, 5, 8, 12), has_cfg=True), 5 * 4 * 6 + 7

    def stored(heads, strategy=ONE, on_cpu=True):
        model = CheckpointModel(replace(file, heads=heads))
        return activations(replace(work, model=model), strategy, on_cpu=on_cpu)

    assert stored(400) - stored(200) == 2 * 2 * 200 * tokens**2 * 4
    ring = ParallelStrategy(ring_degree=2)
    assert stored(4, ring) == stored(0, ring)
    assert stored(4, on_cpu=False) == stored(400, on_cpu=False)
    assert 2**31 <= stored(10**9) < 2**31 + 2**24, "ComfyUI takes fewer queries where memory is short"


def test_the_cpu_reorders_the_weights_of_a_convolution_beside_casting_them(file):
    """The largest layer has 64 x 256 numbers, in bfloat16 in the file, and is cast to float32 to compute."""
    unet = replace(file, heads=0, unet=UNetFacts(), latent=CELLS)
    for model, copies in ((file, 1), (unet, 2)):
        assert max(part.cast for part in held(model, on_cpu=True).parts) == copies * 64 * 256 * 4


def test_bands_are_called_so(file):
    shape = replace(file, heads=0, mode=BANDS, unet=UNetFacts(band_rows=8)).shape
    assert shape.describe(ParallelStrategy(cfg_degree=2, ulysses_degree=2)) == "CFG 2 × bands 2"
    assert shape.describe(ParallelStrategy(ring_degree=2, ulysses_degree=2)) == "bands 4"
    assert shape.describe(ONE) == "one device"
    assert file.shape.describe(ParallelStrategy(ulysses_degree=2)) == "Ulysses 2"


def test_candidates_are_those_that_the_model_has(file):
    both = job(file, (2, 16, 1, 8, 8), has_cfg=True)
    found = enumerate_candidates(both, 4, sharded=False)
    assert all(c.tensor_degree == 1 for c in found)
    assert ParallelStrategy(ulysses_degree=3) in found
    assert ParallelStrategy(pipefusion_degree=2, ulysses_degree=2) in found
    rows = enumerate_candidates(replace(both, model=CheckpointModel(replace(file, mode=ROWS))), 4)
    assert rows and all(c.sequence_degree == 1 for c in rows)
    assert ParallelStrategy(data_degree=2, cfg_degree=2) in rows


def test_stages_hold_their_own_blocks(file):
    stages = ParallelStrategy(pipefusion_degree=2, warmup_steps=1)
    assert stages.violations(file.shape, 2) == []
    for without in ({"module": "VaceWanModel"}, {"mode": BLOCK}, {"mode": ROWS}):
        assert stages.violations(replace(file, **without).shape, 2)
    both = job(file, (1, 16, 5, 8, 12), has_cfg=True, steps=4)
    assert stages in enumerate_candidates(both, 4)
    whole, first, last = held(file), held(file, stages, 0), held(file, stages, 1)
    assert [part.block for part in first.parts] == [None, 0] and [p.block for p in last.parts] == [None, 1, 2]
    assert first.private + last.private == whole.private + first.around.private
    # Stages compute all rows at once, so a second row doubles the activations.
    assert activations(both, stages) == 2 * activations(replace(both, prompts=1), stages)


def test_stages_of_lists_of_unequal_bytes_hold_what_lies_in_them_and_refiners_lie_in_all(file):
    """A model like Flux: two large blocks, then four small ones, split by their number, and two of a text refiner. The
    file has the refiner first, the other two lists in the opposite order, and one of them under another name."""
    refiner, single, double = (
        CountedBlocks("txt_in.refiner.blocks", 2, 11, 1),
        CountedBlocks("single_blocks", 4, 100, 1),
        CountedBlocks("transformer_blocks", 2, 240, 1),
    )
    lists = by_stages((refiner, single, double), {"double_blocks": 2, "single_blocks": 4})
    assert lists == (double, single, replace(refiner, everywhere=True))
    assert by_stages((refiner, single), {"double_blocks": 3, "single_blocks": 4}) == (refiner, single)
    assert by_stages((refiner, single), {}) == (refiner, single)
    flux = with_weights(file, blocks=lists, around_bytes=7)
    assert flux.shape.blocks == 6 and flux.tensor_bytes == 7 + 2 * 11 + 4 * 100 + 2 * 240
    for shares, blocks in (((), (2 * 240 + 100, 3 * 100)), ((1.0, 3.0), (2 * 240, 4 * 100))):
        stages = ParallelStrategy(pipefusion_degree=2, warmup_steps=1, device_shares=shares)
        assert [held(flux, stages, rank).private for rank in range(2)] == [7 + 2 * 11 + own for own in blocks]
        one, other = predict_memory(job(flux, steps=4), stages)
        assert one.weights - other.weights == blocks[0] - blocks[1]
    assert held(flux).private == flux.tensor_bytes


@pytest.mark.parametrize("has_cfg", [True, False])
@pytest.mark.parametrize("changes", [{}, {"heads": 0, "width": 0}, {"mode": ROWS, "unet": UNetFacts()}])
def test_the_ranking_takes_any_model_and_knows_no_other_way_to_split_it(file, changes, has_cfg):
    whole = job(replace(file, **changes), (1, 16, 5, 64, 64), has_cfg=has_cfg)
    ranking = rank_candidates(Candidate(s, largest(whole, s)) for s in enumerate_candidates(whole, 4))
    best = ranking.best.strategy
    assert best.violations(whole.model.shape, 4) == [] and 0 < ranking.best.memory_bytes < 80e9
    assert best.row_degree == (2 if has_cfg else 1)
