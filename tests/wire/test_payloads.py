"""The latent and the prompt of a module call are checked against the model's shapes before they are sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.requests import InputShapes
from parallel_backend.wire.payloads import check_module_inputs

TAKES = InputShapes("m.safetensors", 8, 4, 16, 16)


PROMPT = r"the prompt: a prompt of width 9 came, and m.safetensors takes prompts of width 8\. Encode it with the text"
LATENT = r"latent_image: a latent of 4 channels came, and m.safetensors takes 16\. Use .* space: the empty"


def test_what_was_made_for_another_model_is_refused_with_what_fits_this_one():
    right = torch.randn(2, 16, 4, 6), torch.randn(1, 3, 8)
    check_module_inputs(*right, TAKES)
    for x, context, words in ((right[0], torch.zeros(1, 3, 9), PROMPT), (right[0][:, :4], right[1], LATENT)):
        with pytest.raises(RequestError, match=words):
            check_module_inputs(x, context, TAKES)


@pytest.mark.parametrize(
    ("x", "context"),
    [
        (torch.zeros(1, 36, 2, 2), torch.zeros(1, 3, 8)),  # the latent joined with an image and its mask
        ([torch.zeros(1, 4, 2), torch.zeros(1, 2, 2)], None),  # a latent in parts, and no prompt
        (torch.zeros(1, 16, 2), [torch.zeros(1, 3, 5)]),  # a list of prompts
    ],
)
def test_what_a_module_may_take_beside_is_let_through(x, context):
    check_module_inputs(x, context, TAKES)
    check_module_inputs(torch.zeros(1, 1), torch.zeros(1, 1), replace(TAKES, context=0))
