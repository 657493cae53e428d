"""The boxes of the diagram: each device's words agree with the engine's groups and rows of that rank."""

import re
from dataclasses import replace

import pytest
import torch

from parallel_backend.engine.comm.groups import rank_groups
from parallel_backend.layout import ROW_AXES, slice_of, split_sizes
from parallel_backend.models.comfyui.model_file import TYPICAL
from parallel_backend.models.diffusers.checkpoint import PUBLISHED_DEV
from parallel_backend.observability.preview.rank_diagram import PROMPTS, assign_devices
from parallel_backend.requests import ATTENTION
from parallel_backend.strategy import ParallelStrategy

# The engine's axes, and the word with which each one's text begins.
AXES = {"pipefusion": "stage", "ring": "ring", "ulysses": "heads", "tensor": "tensor"}
HYBRIDS = [
    ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2),
    ParallelStrategy(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2),
    ParallelStrategy(data_degree=2, cfg_degree=2, ring_degree=2),
    ParallelStrategy(data_degree=2, ring_degree=3, ulysses_degree=2, tensor_degree=2),
    ParallelStrategy(data_degree=3, pipefusion_degree=2, ring_degree=2),
]


def _assigned(strategy, idle=0, **request):
    devices = tuple(f"cuda:{i}" for i in range(strategy.world_size + idle))
    return assign_devices(strategy, devices, PUBLISHED_DEV, **request)


def _roles(assigned):
    return {role["axis"]: role["text"] for role in assigned["roles"]}


@pytest.mark.parametrize("strategy", HYBRIDS, ids=ParallelStrategy.describe)
def test_each_axis_reads_as_the_engines_groups_are(strategy):
    devices = _assigned(strategy)
    for axis, word in AXES.items():
        for group in rank_groups(strategy, (axis,)):
            texts = [_roles(devices[rank]).get(axis) for rank in group]
            if len(group) == 1:
                assert texts == [None]
                continue
            numbers = [re.match(rf"{word} (\d+)(?:/| of )(\d+)", text).groups() for text in texts]
            assert numbers == [(str(i + 1), str(len(group))) for i in range(len(group))]
            # Apart from that the members of a group are equal.
            others = [{a: t for a, t in _roles(devices[rank]).items() if a != axis} for rank in group]
            assert all(other == others[0] for other in others)


@pytest.mark.parametrize("strategy", HYBRIDS, ids=ParallelStrategy.describe)
@pytest.mark.parametrize(("images", "prompts"), [(0, 0), (2, 2), (3, 2), (5, 1), (1, 1)])
def test_each_device_names_the_rows_that_the_engine_gives_it(strategy, images, prompts):
    devices = _assigned(strategy, images=images, prompts=prompts)
    images, prompts = images or strategy.data_degree, prompts or strategy.cfg_degree
    # Each row's number is 10 * prompt + image; in a call all rows of the first prompt come first.
    numbers = torch.tensor([image + 10 * prompt for prompt in range(prompts) for image in range(images)])
    sizes = split_sizes(images * prompts, strategy.row_degree)
    for group in rank_groups(strategy, ROW_AXES):
        for index, rank in enumerate(group):
            taken = numbers[slice_of(sizes, index)].tolist()
            assert _numbers(_roles(devices[rank]).get("rows"), images, prompts) == taken


def _numbers(text, images, prompts):
    """Reads `prompt, images 2 to 3 of 3 + negative prompt, image 1 of 3` as rows 10 * prompt + image, both from 0."""
    found = []
    if text is None:
        text = " + ".join(PROMPTS[:prompts]) if prompts == 2 else f"images 1 to {images} of {images}"
    for part in [] if text == "no image" else text.split(" + "):
        prompt = 1 if part.startswith(PROMPTS[1]) else 0
        range_ = re.search(r"(\d+)(?: to (\d+))? of (\d+)", part)
        assert not range_ or int(range_[3]) == images
        first, last = (int(range_[1]), int(range_[2] or range_[1])) if range_ else (1, images)
        found += [10 * prompt + image - 1 for image in range(first, last + 1)]
    return found


def test_a_device_in_a_line_those_beyond_the_strategy_are_idle():
    third, *_, last = _assigned(HYBRIDS[1])[2:]
    assert third["text"] == "cuda:2 · prompt · stage 2 of 2, 29 of 57 blocks · heads 1/2"
    assert last["text"] == "cuda:7 · negative prompt · stage 2 of 2, 29 of 57 blocks · heads 2/2"
    *_, idle = _assigned(HYBRIDS[1], idle=1)
    assert (idle["device"], idle["rank"], idle["text"]) == ("cuda:8", None, "cuda:8 · idle")


def test_unequal_shares_are_said_in_hundredths_of_the_tokens():
    devices = _assigned(ParallelStrategy(ring_degree=2, device_shares=(3, 1)))
    assert [_roles(device)["share"] for device in devices] == ["75 % of the tokens", "25 % of the tokens"]


def test_a_device_of_a_model_whose_attention_alone_is_shared_out():
    file = replace(TYPICAL, mode=ATTENTION)
    devices = assign_devices(ParallelStrategy(ulysses_degree=2), ("cuda:0", "cuda:1"), file)
    assert [_roles(device)["ulysses"] for device in devices] == ["queries 1/2", "queries 2/2"]
