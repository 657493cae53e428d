"""What a model call carries beside its latent is checked before it is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.requests import Conditioning, InputShapes, SampleRequest
from parallel_backend.wire.payloads import check_inputs, check_module_inputs

TEXT, IMAGE, REFERENCE = 3, 6, 4  # tokens
SIZE = TEXT + IMAGE + REFERENCE


TAKES = InputShapes("m.safetensors", 8, 4, 16, 16, "t5xxl", "Empty Latent")


def test_a_call_of_comfyuis_own_module_is_refused_in_the_same_words():
    right = torch.randn(2, 16, 4, 6), torch.randn(1, 3, 8)
    check_module_inputs(*right, TAKES)
    for x, context in ((right[0], torch.zeros(1, 3, 9)), (right[0][:, :4], right[1])):
        prompt = Conditioning(context, torch.randn(1, 4))
        request = SampleRequest(x, x, torch.tensor([1.0, 0.0]), prompt, None, 1.0, "euler", 0)
        with pytest.raises(RequestError) as asked:
            check_inputs(request, TAKES)
        with pytest.raises(RequestError) as called:
            check_module_inputs(x, context, TAKES)
        assert str(called.value) == str(asked.value).replace("positive", "the prompt")


@pytest.mark.parametrize(
    ("x", "context"),
    [
        (torch.zeros(1, 36, 2, 2), torch.zeros(1, 3, 8)),  # an image and its mask beside the latent
        ([torch.zeros(1, 4, 2), torch.zeros(1, 2, 2)], None),  # a latent in parts, and no prompt
        (torch.zeros(1, 16, 2), [torch.zeros(1, 3, 5)]),  # prompts of its own kind
    ],
)
def test_what_a_module_may_take_beside_is_let_through(x, context):
    check_module_inputs(x, context, TAKES)
    check_module_inputs(torch.zeros(1, 1), torch.zeros(1, 1), replace(TAKES, context=0))
