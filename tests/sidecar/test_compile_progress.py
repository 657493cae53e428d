"""Compiling in the middle of a request is reported once and extends the step's time limit."""

from __future__ import annotations

import torch

from parallel_backend.sidecar.model_requests import CompileWatch, latent_in_words
from parallel_backend.wire.deadlines import FIRST_STEP
from parallel_backend.wire.protocol import Compiling, Progress

STEP = Progress(step=1, steps=2, seconds=0.5)


def test_it_is_said_once_and_has_the_time_of_a_first_step_until_the_next_sign_of_life():
    said = []
    watch = CompileWatch(latent_in_words(torch.zeros(1, 16, 96, 128)), said.append)
    assert not watch.took(STEP) and said == [] and watch.budget(30.0) == 30.0
    assert watch.took(Compiling()) and watch.budget(30.0) == FIRST_STEP
    assert watch.took(Compiling()) and [phase.text for phase in said] == [
        "compiling for a latent of 16 x 96 x 128; this step takes longer"
    ]
    assert not watch.took(STEP) and watch.budget(30.0) == 30.0
