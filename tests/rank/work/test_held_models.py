"""The models that one rank holds, in the order in which it drops them."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel_backend.errors import RequestError
from parallel_backend.rank.work.device import weight_bytes
from parallel_backend.rank.work.held_models import HeldModel, HeldModels, import_for, release_cache
from parallel_backend.rank.work.worker import RankWorker
from parallel_backend.requests import LoadInfo, ModelSpec
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.protocol import Load, MoveOut, RankModels

GIB = 2**30
CPU = torch.device("cpu")


def held(width=4):
    return _held_of(nn.Linear(width, width))


def _held_of(*chunks):
    model = SimpleNamespace(chunks=chunks, leave_device=lambda: None, come_back=lambda: None)
    return HeldModel(model)


@pytest.fixture
def models():
    found = HeldModels(CPU)
    for number in (1, 2, 3):
        found.add(number, held(number))
    return found


def test_a_model_is_found_by_its_number_and_others_are_refused(models):
    assert models.get(2).model.chunks[0].in_features == 2
    with pytest.raises(RequestError, match="hold no model 4; load one first"):
        models.get(4)
    assert len(models) == 3 and models.report() == RankModels((1, 2, 3), 0, 0)


def test_what_is_kept_goes_in_the_order_that_was_told(models):
    models.keep((3, 1, 7))  # 7 is gone already
    assert models.report().models == (3, 1)
    models.add(4, held())
    models.drop_first()
    assert models.report().models == (1, 4)
    models.keep(())
    assert not models and models.chunks == ()
    models.drop_first()
    assert models.report().models == ()


def test_the_weights_of_all_count_and_a_dropped_ones_are_gone_at_once(models):
    assert weight_bytes(models.chunks, CPU) == 4 * ((1 + 1) + (4 + 2) + (9 + 3))
    weight = weakref.ref(models.get(1).model.chunks[0].weight)
    models.get(1).model.itself = models.get(1).model  # a cycle, which only a collection frees
    gc.disable()
    try:
        models.keep((2, 3))
        assert weight() is None
    finally:
        gc.enable()
    assert weight_bytes(models.chunks, CPU) == 4 * ((4 + 2) + (9 + 3))


def test_a_gpu_says_what_it_has_for_the_next_model(monkeypatch):
    """A card of 24 GiB holds two models of 10 GiB: 2 GiB are free, and torch keeps 1 GiB for its next allocations."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 21 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)
    rank = HeldModels(torch.device("cuda:0"))
    rank.add(1, held())
    rank.add(2, held())
    assert rank.report() == RankModels((1, 2), 3 * GIB, 24 * GIB)


def test_weights_move_out_once_and_those_that_are_elsewhere_stay():
    one = _held_of(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    here, elsewhere = one.model.chunks
    one.move_out(CPU)
    assert one.moved_out == [here]
    one.move_out(torch.device("meta"))  # the first one has left its device already
    assert one.moved_out == [here, elsewhere]


@pytest.fixture
def worker(models):
    """Returns rank 0, which holds `models`."""
    found = RankWorker.__new__(RankWorker)
    found.world = SimpleNamespace(rank=0, device=CPU, control=None)
    found.models, found.meter = models, SimpleNamespace(record_weights=lambda chunks: None)
    return found


@pytest.mark.parametrize(("rank", "moves"), [(0, True), (1, False)])
def test_only_the_rank_that_is_named_moves_the_model_that_is(models, worker, rank, moves):
    worker.world.rank = rank
    worker.move_out(MoveOut(0, 2))
    assert [bool(one.moved_out) for _, one in models] == [False, moves, False] and len(models) == 3
    worker.take_back()
    assert not any(one.moved_out for _, one in models)


@dataclass
class Beside:
    """Stands in for a text encoder or VAE."""

    def info(self, seconds, device):
        return LoadInfo(seconds, 4, False, "", "")


def test_text_encoders_and_vaes_are_held_with_the_others(models):
    models.add(7, Beside())
    assert models.report().models == (1, 2, 3, 7) and [number for number, _ in models] == [1, 2, 3]
    with pytest.raises(RequestError, match="model 7 is a text encoder or VAE"):
        models.of_file(7)
    assert models.of_file(2) is models.get(2)
    models.keep((7, 3, 1))
    models.drop_first()
    assert models.report().models == (3, 1)


@pytest.mark.parametrize("yields", [False, True])
@pytest.mark.parametrize("is_module", [False, True], ids=["a model", "a text encoder"])
def test_what_goes_where_memory_ends_is_as_little_as_helps_in_the_order_that_was_told(
    models, worker, monkeypatch, is_module, yields
):
    models.add(7, Beside())

    def read(*_):
        if 1 in models.report().models:
            raise MemoryError
        return Beside()

    worker.modules = SimpleNamespace(load=read)
    monkeypatch.setattr(worker, "_read_held", read)
    spec = None if is_module else ModelSpec("new.safetensors")
    message = Load(spec, ParallelStrategy(), 4, (7, 1, 2, 3), yields)
    if yields:
        with pytest.raises(MemoryError):
            worker.load(message, {})
        assert models.report().models == (7, 1, 2, 3)
    else:
        worker.load(message, {})
        assert models.report().models == (2, 3, 4)


def test_what_torch_keeps_is_given_back_on_a_gpu(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    release_cache(CPU)
    assert emptied == []
    release_cache(torch.device("cuda:0"))
    assert emptied == [True]


@pytest.mark.parametrize("holds_nothing", [True, False])
def test_what_is_imported_is_no_garbage_and_what_is_held_meanwhile_may_become_some(holds_nothing):
    def cycle():
        found = nn.Identity()
        found.__dict__["itself"] = found
        return found, weakref.ref(found)

    before, seen_before = cycle()
    import_for(ModelSpec("none.safetensors"), CPU, holds_nothing=holds_nothing)
    since, seen_since = cycle()
    del before, since
    gc.collect()
    assert seen_since() is None
    assert (seen_before() is not None) == holds_nothing  # never collected, so ranks must hold nothing
    if seen_before() is not None:
        del seen_before().__dict__["itself"]
