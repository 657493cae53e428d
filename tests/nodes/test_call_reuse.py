"""Which calls of ComfyUI's own loop go by a step cache: those of which it is certain which ones they are like."""

from __future__ import annotations

import pytest
import torch

from pack_nodes import import_node_module
from parallel_backend.models.comfyui.patches import ARGUMENT
from parallel_backend.requests import ModuleCall

call_reuse = import_node_module("nodes.model.call_reuse")
THRESHOLD = 0.1
PLAIN = {"run": None, "patches": {}, "objects": [], "skipped": []}


@pytest.fixture
def run():
    return call_reuse.CallReuse(THRESHOLD)


def of(run, sigma, prompts=("a",), *, options=None, size=4, **kwargs):
    """(number of the calls that it is like, threshold) of one at this noise level."""
    call = ModuleCall((torch.zeros(1, 16, size, 4), torch.ones(1)), kwargs, 1)
    known = {"uuids": list(prompts), "sigmas": torch.full((1,), sigma)}
    found = run.of(call, known | (options or {}))
    return found.like, found.threshold


def test_calls_for_the_same_prompts_at_falling_noise_are_alike(run):
    assert [of(run, sigma) for sigma in (1.0, 0.5, 0.25)] == [(1, THRESHOLD)] * 3
    assert of(run, 0.2, ("b",)) == (2, THRESHOLD)
    assert of(run, 0.1) == (1, THRESHOLD) and run.why_whole == ""


def test_the_last_step_says_that_it_is(run):
    steps = {"sample_sigmas": torch.tensor([1.0, 0.6, 0.3, 0.0])}
    call = ModuleCall((torch.zeros(1, 16, 4, 4), torch.ones(1)), {}, 1)
    known = [steps | {"uuids": ["a"], "sigmas": torch.full((1,), sigma)} for sigma in (1.0, 0.6, 0.3)]
    assert [run.of(call, options).last for options in known] == [False, False, True]


def test_other_sizes_options_and_patches_are_another_kind_of_call(run):
    control = {"output": [torch.zeros(1, 4, 8)]}
    kinds = [
        {},
        {"size": 6},
        {"control": control},
        {"transformer_options": {"layers": (1, 2)}},
        {"transformer_options": {"layers": (1, 3)}},
        {ARGUMENT: PLAIN},
        {ARGUMENT: PLAIN | {"skipped": [["double_block", 1]]}},
    ]
    for sigma in (1.0, 0.5):
        assert [of(run, sigma, **kind)[0] for kind in kinds] == list(range(1, len(kinds) + 1))


def test_a_patch_that_stops_acting_makes_another_kind(run):
    patch = {"values": {"sigma_start": 1.0, "sigma_end": 0.4}}
    acting = {ARGUMENT: PLAIN | {"objects": [patch]}}
    assert [of(run, sigma, **acting)[0] for sigma in (0.9, 0.5, 0.3, 0.1)] == [1, 1, 2, 2]


def test_noise_that_was_added_again_begins_anew(run):
    of(run, 0.5)
    assert of(run, 0.8) == (1, 0.0)  # computed whole, and kept
    assert of(run, 0.4) == (1, THRESHOLD)


def test_two_calls_at_one_noise_level_leave_all_further_ones_whole(run):
    """A sampler's second look at it, or two tiles of an image: nobody knows."""
    found = [of(run, sigma) for sigma in (1.0, 0.5, 0.5, 0.25)]
    assert found == [(1, THRESHOLD), (1, THRESHOLD), (1, 0.0), (0, 0.0)]  # the third ends what was kept
    assert of(run, 0.25, ("b",)) == (2, THRESHOLD)
    assert "more than once at one noise level" in run.why_whole


@pytest.mark.parametrize(
    ("options", "kwargs", "words"),
    [
        ({"uuids": []}, {}, "without saying for which prompts"),
        ({"sigmas": None}, {}, "without saying for which prompts"),
        ({"context_window": object()}, {}, "in windows"),
        ({}, {ARGUMENT: PLAIN | {"run": {"kind": "frames"}}}, "keeps its frames"),
    ],
)
def test_what_cannot_be_told_apart_is_whole_and_the_reason_is_said(run, options, kwargs, words):
    assert of(run, 1.0, options=options, **kwargs)[0] == 0
    assert words in run.why_whole
    assert of(run, 0.5) == (1, THRESHOLD)  # others are not concerned


def test_there_are_not_ever_more_kinds(run):
    found = [of(run, 1.0, (prompt,))[0] for prompt in range(call_reuse.MOST_KINDS + 2)]
    assert found == [*range(1, call_reuse.MOST_KINDS + 1), 0, 0]
    assert "ever other kinds" in run.why_whole


def test_each_run_has_a_number_of_its_own_and_a_reason_for_none_stays():
    call = ModuleCall((torch.zeros(1, 16, 4, 4), torch.ones(1)), {}, 1)
    options = {"uuids": ["a"], "sigmas": torch.ones(1)}
    one, never = call_reuse.CallReuse(THRESHOLD), call_reuse.CallReuse(THRESHOLD, "it has no blocks")
    assert one.of(call, options).run != never.of(call, options).run
    assert never.of(call, options).like == 0 and never.why_whole == "it has no blocks"
