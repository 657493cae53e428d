"""The tiny models: their data in cases.json is used and followed; they cover the table's classes and their calls."""

import json
from pathlib import Path

import pytest
import torch

from parallel_backend.job.changes import changes_of
from parallel_backend.models.comfyui.tiny import cases, special_cases
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.table import TABLE, token_mode
from parallel_backend.requests import BANDS, BLOCK, STAY

DATA = json.loads(Path(cases.__file__).with_name("cases.json").read_text())


def test_each_model_call_and_function_is_of_a_case():
    used = [case for by_name in DATA["cases"].values() for case in by_name.values()]
    models, calls = ({case[place] for case in used} for place in range(2))
    assert set(DATA["models"]) == models | {
        entry["like"] for entry in DATA["models"].values() if "like" in entry
    }
    likes = {entry["like"] for entry in DATA["calls"].values() if "like" in entry}
    assert {*DATA["calls"], *special_cases.CALLS} == calls | likes
    assert set(special_cases.MODELS) <= models


@pytest.mark.parametrize(("b", "h", "w"), [(1, 8, 6), (3, 7, 5)])
def test_a_call_takes_the_sizes_and_numbers_that_its_data_say(b, h, w):
    (x, times), kwargs = cases.tiny_inputs("scail 2")(b, h, w)
    h, w = h + h % 2, w + w % 2
    assert x.equal(random(b, 20, 3, h, w)) and times.equal(torch.linspace(900, 500, b))
    assert kwargs["context"].equal(random(b, 7, 48)), "as the call that it is like"
    assert kwargs["sam_latents"].equal(random(b, 28, 3, h // 2, w // 2, seed=8))
    assert kwargs["ref_mask_flag"].equal(torch.tensor(False))
    kwargs = cases.tiny_inputs("qwen edit")(b, h, w)[1]
    assert kwargs["ref_latents"][1].equal(random(b, 16, 1, 4, 4, seed=4))
    assert kwargs["ref_latents_method"] == "index_timestep_zero"
    kwargs = cases.tiny_inputs("ace-step, codes")(b, h, w)[1]
    assert kwargs["audio_codes"].equal(torch.arange(-(-h * w // 5)).repeat(b, 1))
    mask = cases.tiny_inputs("hunyuan")(b, h, w)[1]["attention_mask"]
    assert mask.tolist() == [[1] * 6 + [0] * 3]


def test_a_configuration_is_that_of_the_model_it_is_like_with_changes():
    flux, flux2 = cases.config_of("flux"), cases.config_of("flux2")
    assert flux2["vec_in_dim"] is None and flux2["hidden_size"] == flux["hidden_size"] == 128
    assert cases.config_of("chroma radiance")["nerf_embedder_dtype"] is torch.float32


def test_every_class_has_a_case():
    assert set(cases.CASES) == set(TABLE)


@pytest.mark.parametrize("name", cases.CASES)
def test_cases_are_of_their_class_and_cover_its_calls(comfyui_here, name):
    given, modes = set(), set()
    for build, inputs in cases.CASES[name].values():
        module = build()
        assert type(module).__name__ == name
        assert type(module).__module__ == TABLE[name].source.removesuffix(".py").replace("/", ".")
        kwargs = inputs(1, 8, 8)[1]
        given |= {key for key, value in kwargs.items() if value is not None}
        modes.add(token_mode(name, kwargs))
    assert given >= TABLE[name].stays_with, "an argument with which tokens stay apart is proven by no call"
    if TABLE[name].bands:
        assert modes == {BANDS}
    else:
        assert modes - {BLOCK} == ({STAY} if TABLE[name].stays_with else set())


@pytest.mark.parametrize("name", cases.CASES)
def test_no_changes_are_found_between_two_networks_as_comfyui_builds_them(comfyui_here, name):
    """Else what a constructor makes would go with each job as a node's change."""
    build, _ = next(iter(cases.CASES[name].values()))
    here, pristine = build(), build()
    known = {id(module): ("module", path) for path, module in here.named_modules()}
    assert list(changes_of(here, pristine, known)) == []
