"""The rows of a module call: which arguments are cut to some rows, and which belong to all rows."""

import pytest
import torch

from parallel_backend.engine.batch_rows import split_rows, take_rows
from parallel_backend.requests import ModuleCall

X, SHARED = torch.arange(12.0).view(4, 3), torch.zeros(1, 3)


def _call(rows=4, **kwargs):
    return ModuleCall((X, torch.arange(4)), kwargs, rows)


def test_all_rows_are_the_call_itself():
    call = _call(context=X)
    assert take_rows(call, slice(0, 4)) is call


@pytest.mark.parametrize(
    ("runs", "wanted", "left"),
    [
        ([1, 0], slice(0, 2), [1]),
        ([1, 0], slice(2, 4), [0]),
        ([1, 0], slice(1, 4), [1, 0, 0]),  # no longer runs of equal length
        ([0], slice(0, 3), [0, 0, 0]),
        ([1, 1, 0, 0], slice(1, 3), [1, 0]),
        ([1, 0, 0], slice(0, 2), [1, 0, 0]),  # three runs do not divide four rows: unchanged
    ],
)
def test_runs_of_positive_and_negative_prompts_follow_their_rows(runs, wanted, left):
    call = take_rows(_call(transformer_options={"cond_or_uncond": runs}), wanted)
    assert call.kwargs["transformer_options"]["cond_or_uncond"] == left


def test_of_the_options_only_the_sigma_of_each_row_is_cut():
    schedule = torch.arange(4.0)  # as many steps as rows
    options = {"sigmas": torch.arange(4.0), "sample_sigmas": schedule, "patch": X}
    cut = take_rows(_call(transformer_options=options), slice(3, 4)).kwargs["transformer_options"]
    assert cut["sigmas"].tolist() == [3.0]
    assert cut["sample_sigmas"] is schedule
    assert cut["patch"] is X
    assert options["sigmas"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_rows_are_shared_out_evenly_but_the_frames_of_a_video_together():
    assert split_rows(_call(5), 3, inseparable=False) == (2, 2, 1)
    assert split_rows(_call(8, num_video_frames=4), 3, inseparable=False) == (4, 4, 0)
    assert split_rows(_call(2, num_video_frames=None), 2, inseparable=False) == (1, 1)
    assert split_rows(_call(4), 3, inseparable=True) == (4, 0, 0)
