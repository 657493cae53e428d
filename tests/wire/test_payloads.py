"""Requests as tensors and back; what a model call carries beside its latent is checked before it is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_backend.errors import RequestError, TransportError
from parallel_backend.requests import Conditioning, Extras, InputShapes, PredictRequest
from parallel_backend.wire.payloads import check_inputs, check_module_inputs, predict_parts, predict_tensors

TEXT, IMAGE, REFERENCE = 3, 6, 4  # tokens
SIZE = TEXT + IMAGE + REFERENCE


def request(**changes) -> PredictRequest:
    extras = Extras(
        references=(torch.randn(1, 16, 4, 3),),
        places=torch.tensor([[0.0, 0, 0, 1, 1], [1.0, 0, 2, 1, 1]]),
        mask=torch.zeros(1, SIZE, SIZE),
        residuals={0: torch.randn(2, IMAGE, 8), 7: torch.randn(1, 2, 8)},
    )
    prompt = Conditioning(torch.randn(1, TEXT, 8), torch.randn(1, 4))
    return PredictRequest(torch.randn(2, 16, 4, 6), torch.ones(2), prompt, replace(extras, **changes))


def test_extras_come_back_as_they_were_sent():
    sent = request()
    _, _, prompt, extras = predict_parts(predict_tensors(sent, with_conditioning=False))
    assert prompt is None and extras.residuals.keys() == {0, 7}
    assert torch.equal(extras.references[0], sent.extras.references[0])
    assert torch.equal(extras.places, sent.extras.places) and torch.equal(extras.mask, sent.extras.mask)
    assert torch.equal(extras.residuals[7], sent.extras.residuals[7])
    assert not predict_parts(predict_tensors(replace(sent, extras=Extras()), False))[3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"references": (torch.zeros(1, 4, 4, 3),)}, "a reference latent has shape"),
        ({"references": (torch.zeros(3, 16, 4, 3),)}, "1 or 2"),
        ({"places": None}, "An image and 1 reference latents need 2 places of 5 numbers"),
        ({"places": torch.full((2, 5), float("nan"))}, "NaN or infinite"),
        ({"references": (torch.full((1, 16, 4, 3), float("nan")),)}, "NaN or infinite"),
        ({"mask": torch.zeros(1, SIZE, SIZE - 1)}, f"expected .1 or 2, {SIZE}, {SIZE}"),
        ({"mask": torch.zeros(SIZE, SIZE)}, "the attention mask has shape"),
        ({"residuals": {3: torch.zeros(1, IMAGE + REFERENCE + 1, 8)}}, "ControlNet adds after block 3"),
        ({"residuals": {3: torch.zeros(3, IMAGE, 8)}}, "ControlNet adds after block 3"),
        ({"residuals": {3: torch.full((1, IMAGE, 8), float("inf"))}}, "NaN or infinite"),
    ],
)
def test_extras_that_do_not_fit_are_named(changes, words):
    with pytest.raises(RequestError, match=words):
        predict_tensors(request(**changes), with_conditioning=True)


def test_a_residual_of_many_blocks_travels_once():
    first, second = torch.randn(1, IMAGE, 8), torch.randn(1, IMAGE, 8)
    residuals = {block: first if block < 5 else second for block in range(1, 8)}
    tensors = predict_tensors(request(residuals=residuals), with_conditioning=False)
    assert sum(name.startswith("residual.") for name in tensors) == 2
    _, _, _, extras = predict_parts(tensors)
    assert extras.residuals.keys() == residuals.keys()
    assert len({id(residual) for residual in extras.residuals.values()}) == 2
    assert all(torch.equal(extras.residuals[block], residuals[block]) for block in residuals)
    for wrong in ([[1, 0]], [[1, 0], [1, 1]], [[1, 0], [2, 2]]):
        with pytest.raises(TransportError, match="residuals"):
            predict_parts({**tensors, "residual_of": torch.tensor(wrong)})
    with pytest.raises(TransportError, match="which block"):
        predict_parts({**tensors, "residual_of": torch.zeros(2)})


@pytest.mark.parametrize("name", ["residual.x", "residual.99999", "reference.1", "reference.-1", "other"])
def test_tensors_that_nobody_sends_are_refused(name):
    tensors = predict_tensors(replace(request(), extras=Extras()), with_conditioning=True)
    with pytest.raises(TransportError):
        predict_parts({**tensors, name: torch.zeros(1)})


TAKES = InputShapes("m.safetensors", 8, 4, 16, 16, "t5xxl", "Empty Latent")


def test_a_call_of_comfyuis_own_module_is_refused_in_the_same_words():
    right = request()
    check_module_inputs(right.x, right.conditioning.context, TAKES)
    for x, context in ((right.x, torch.zeros(1, TEXT, 9)), (right.x[:, :4], right.conditioning.context)):
        with pytest.raises(RequestError) as asked:
            check_inputs(
                replace(right, x=x, conditioning=replace(right.conditioning, context=context)), TAKES
            )
        with pytest.raises(RequestError) as called:
            check_module_inputs(x, context, TAKES)
        assert str(called.value) == str(asked.value)


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
