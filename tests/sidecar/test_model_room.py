"""The choice of held models to drop for another one: by their number in host memory, by bytes on devices."""

from dataclasses import replace

import pytest

from parallel_backend.requests import LoadInfo, ModelSpec
from parallel_backend.sidecar import model_room as held_models
from parallel_backend.sidecar.model_room import (
    FREE_FOR_CALLS,
    LACK_OF_MEMORY,
    MOST_MAPPED,
    CountedModel,
    ModelKey,
    Room,
    choose_to_drop,
    free_room,
    predict_room,
    slowest,
)
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.file_identity import FileIdentity
from parallel_backend.wire.protocol import RankModels

GIB = 2**30
SHARDED = ParallelStrategy(ulysses_degree=2, shard_weights=True).weights
INFO = LoadInfo(1.0, 4, False, "bfloat16", "bfloat16")


def key(name, weights=None, inode=1):
    identity = FileIdentity(1, inode, 10, 0, "")
    return ModelKey(ModelSpec(f"/models/{name}.safetensors"), weights or ParallelStrategy(), identity)


def model(name, *device_gib, host=0, **more):
    devices = tuple(gib * GIB for gib in device_gib) or (0, 0)
    return CountedModel(ord(name), key(name, **more), INFO, Room(devices, host * GIB))


def dropped(held, wanted, needed, free):
    """Returns (name, reason) of each dropped model. `needed`, `free`: GiB on rank 0, rank 1 and the host."""
    rooms = [Room((int(one * GIB), int(two * GIB)), int(host * GIB)) for one, two, host in (needed, free)]
    return [
        (gone.key.name.removesuffix(".safetensors"), why)
        for gone, why in choose_to_drop(held, wanted, *rooms).items()
    ]


def test_of_mapped_files_there_is_a_most():
    held = [model(name) for name in "abcd"]
    assert len(held) == MOST_MAPPED
    assert dropped(held[1:], key("x"), (0, 0, 0), (0, 0, 0)) == []
    assert dropped(held, key("x"), (0, 0, 0), (0, 0, -1)) == [("a", "4 are the most")]
    beside = [model("a", 10, 10), *held[1:]]  # the first takes device memory, so it is no mapped file
    assert dropped(beside, key("x"), (0, 0, 0), (0, 0, 0)) == []


def test_on_devices_the_oldest_go_until_every_rank_has_room():
    held = [model("a", 10, 10), model("b", 30, 5), model("c", 10, 10)]
    assert dropped(held, key("x"), (20, 20, 0), (20, 20, 0)) == []
    assert dropped(held, key("x"), (20, 20, 0), (15, 40, 0)) == [("a", LACK_OF_MEMORY)]
    # Rank 1 still lacks room after rank 0 has it.
    assert [name for name, _ in dropped(held, key("x"), (20, 20, 0), (40, 8, 0))] == ["a", "b"]
    assert [name for name, _ in dropped(held, key("x"), (99, 99, 0), (1, 1, 0))] == ["a", "b", "c"]


def test_shares_in_host_memory_give_way_to_each_other():
    held = [model("a"), model("c", 10, 10), model("b", host=10), model("d", host=10)]
    assert dropped(held, key("x"), (0, 0, 20), (0, 0, 20)) == []
    assert dropped(held, key("x"), (0, 0, 20), (0, 0, 12)) == [("b", LACK_OF_MEMORY)]


def test_room_for_calls_stays_free(monkeypatch):
    monkeypatch.setattr(held_models, "host_memory", lambda: 1000)
    monkeypatch.setattr(held_models, "available_memory", lambda total: total // 2)
    found = free_room([RankModels((), free_bytes=50, total_bytes=100), RankModels((), 0, 0)])
    assert found == Room((40, 0), 400) and FREE_FOR_CALLS == 0.1


def test_a_changed_file_and_another_split_of_the_same_one_go_first():
    held = [model("a", 10, 10), model("b", 10, 10)]
    assert dropped(held, key("b", inode=2), (10, 10, 0), (50, 50, 0)) == [("b", "its file has changed")]
    assert dropped(held, key("b", SHARDED), (5, 5, 0), (50, 50, 0)) == [("b", "it is split another way now")]
    assert dropped(held, key("b", SHARDED), (25, 25, 0), (10, 10, 0)) == [
        ("b", "it is split another way now"),
        ("a", LACK_OF_MEMORY),
    ]
    in_host_memory = [model("b"), model("a")]  # there, two splits of one file use the same mapping
    assert dropped(in_host_memory, key("b", SHARDED), (0, 0, 0), (0, 0, 0)) == []


@pytest.mark.parametrize(
    ("strategy", "on_gpus", "on_cpu"),
    [
        (ParallelStrategy(ulysses_degree=4), Room((48,) * 4), Room((0,) * 4)),
        (ParallelStrategy(ulysses_degree=4, shard_weights=True), Room((12,) * 4), Room((0,) * 4, 48)),
        (ParallelStrategy(ulysses_degree=2, tensor_degree=2), Room((24,) * 4), Room((0,) * 4)),
        (
            ParallelStrategy(ulysses_degree=2, tensor_degree=2, shard_weights=True),
            Room((12,) * 4),
            Room((0,) * 4, 48),
        ),
        (ParallelStrategy(pipefusion_degree=4), Room((12,) * 4), Room((0,) * 4)),
        (
            ParallelStrategy(ulysses_degree=4, shard_weights=True, offload_weights=True),
            Room((0,) * 4, 48),
            Room((0,) * 4, 48),
        ),
    ],
)
def test_ranks_take_their_parts_of_the_file(strategy, on_gpus, on_cpu):
    file = FileIdentity(1, 1, 48, 0, "")
    wanted = ModelKey(ModelSpec("/models/a.safetensors"), strategy.weights, file)
    assert predict_room(wanted, [f"cuda:{rank}" for rank in range(4)]) == on_gpus
    assert predict_room(wanted, [f"cpu:{rank}" for rank in range(4)]) == on_cpu


def test_a_load_is_as_slow_as_its_slowest_rank_and_as_large_as_its_fullest():
    found = slowest([replace(INFO, device_bytes=5), replace(INFO, seconds=2.0, device_bytes=3)])
    assert (found.seconds, found.device_bytes) == (2.0, 5)
