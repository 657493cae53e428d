"""The check of Strategy Selector's inputs: problems by input in the backend's words, and an answer to any JSON."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_backend.errors import CheckpointError, RequestError, StrategyError
from parallel_backend.models.comfyui.model_file import ANY_MODEL
from parallel_backend.models.diffusers.checkpoint import PUBLISHED_DEV
from parallel_backend.observability.preview.form import (
    LIMITS,
    Loader,
    SelectorInputs,
    check_inputs,
    find_problems,
    read_request,
)
from parallel_backend.observability.preview.preview import preview
from parallel_backend.planner.rules import StrategySettings


def _check(find_file=lambda *loader: None, **inputs):
    body = read_request({"inputs": inputs})
    answer = check_inputs(body.inputs, body.loader, find_file)
    json.dumps(answer, allow_nan=False)
    return answer


def _manual(devices, **inputs):
    return _check(mode="manual", devices=devices, **inputs)


def test_what_can_run_is_laid_out_and_said_as_the_node_says_it():
    answer = _manual("cpu:4", cfg_degree=2, ulysses_degree=2)
    assert answer["problems"] == []
    (case,) = answer["layout"]
    assert case["title"] == "CFG 2 × Ulysses 2"
    assert [seat["text"] for seat in case["seats"]] == [
        "cpu:0 · prompt · heads 1/2",
        "cpu:1 · prompt · heads 2/2",
        "cpu:2 · negative prompt · heads 1/2",
        "cpu:3 · negative prompt · heads 2/2",
    ]
    chosen = SelectorInputs("manual", "cpu:4", cfg_degree=2, ulysses_degree=2).settings()
    assert answer["why"].startswith(preview(chosen).why)


def test_memory_is_told_of_a_known_model_alone_and_at_the_size_of_its_images():
    chosen = SelectorInputs(devices="cpu:2")
    assert "GiB" not in preview(chosen.settings()).why
    told = check_inputs(chosen, Loader("ParallelDemoLoader"), lambda *loader: PUBLISHED_DEV)["memory"]
    assert " at 128x128, on the fullest device: " in told and "; once for all processes, " in told
    flux = check_inputs(chosen, Loader("ParallelFluxLoader"), lambda *loader: PUBLISHED_DEV)
    assert "at 1024x1024" in flux["memory"]
    assert check_inputs(chosen, Loader(), lambda *loader: None)["memory"] == ""
    any_model = check_inputs(chosen, Loader("ParallelModel"), lambda *loader: ANY_MODEL)
    assert any_model["memory"] == "" and "24" not in any_model["why"] and "GiB" not in any_model["why"]


def test_auto_is_shown_without_and_with_a_negative_prompt_and_decides_all_degrees():
    answer = _check(devices="cpu:2")
    live = {"mode", "devices", "engine", "device_shares", "approximation"}
    assert set(answer["decided"]) == set(SelectorInputs.__dataclass_fields__) - live
    assert [case["title"] for case in answer["layout"]] == [
        "Without a negative prompt: Ulysses 2",
        "With a negative prompt: CFG 2",
    ]
    assert len(_check(devices="cpu:1")["layout"]) == 1
    assert _manual("cpu:2")["decided"] == []


@pytest.mark.parametrize(
    ("inputs", "marked", "word"),
    [
        ({"ring_degree": 3, "devices": "cpu:2"}, ["ring_degree", "devices"], "needs 3 devices"),
        ({"cfg_degree": 3, "devices": "cpu:3"}, ["cfg_degree"], "only two prompts"),
        ({"devices": "gpu7"}, ["devices"], "is not understood"),
        ({"devices": "cpu:99"}, ["devices"], "1 to 16 processes"),
        ({"device_shares": "1", "devices": "cpu:2"}, ["device_shares"], "write one number for each"),
        ({"device_shares": "1,0", "ring_degree": 2, "devices": "cpu:2"}, ["device_shares"], "above 0"),
        (
            {"device_shares": "1e308,1.1e308", "ring_degree": 2, "devices": "cpu:2"},
            ["device_shares"],
            "at most",
        ),
        (
            {"pipefusion_degree": 2, "tensor_degree": 2, "devices": "cpu:4"},
            ["pipefusion_degree", "tensor_degree"],
            "the layers of a pipeline's stages are not split yet",
        ),
        ({"mode": "magic"}, ["mode"], "magic"),
        ({"engine": "magic"}, ["engine"], "magic"),
        ({"approximation": "magic"}, ["approximation"], "magic"),
        ({"warmup_steps": -1}, ["warmup_steps"], "it must be from 0 to 10000"),
        ({"cfg_degree": 10**99}, ["cfg_degree"], "it must be from 1 to 64"),
    ],
)
def test_a_problem_names_the_inputs_it_lies_in(inputs, marked, word):
    answer = _check(**{"mode": "manual", **inputs})
    (problem,) = answer["problems"]
    assert problem["inputs"] == marked and word in problem["message"]
    assert answer["layout"] == []
    assert set(marked) <= set(SelectorInputs.__dataclass_fields__)


def test_every_broken_rule_is_a_problem_of_its_own_says_what_a_run_would_and_what_to_change():
    wrong = {"cfg_degree": 3, "ulysses_degree": 5}
    with pytest.raises(StrategyError) as raised:
        preview(SelectorInputs("manual", "cpu:2", **wrong).settings())
    answer = _manual("cpu:2", **wrong)
    problems, nearest = answer["problems"], answer["nearest"]
    assert [problem["inputs"][0] for problem in problems] == ["cfg_degree", "cfg_degree"]
    assert all(problem["message"] in str(raised.value) for problem in problems)
    assert nearest == {"cfg_degree": 1, "ulysses_degree": 2}
    answer = _manual("cpu:2", **wrong | nearest)
    assert answer["problems"] == [] and answer["nearest"] == {}


def test_the_rules_of_every_model_that_is_decided_for_count():
    pipelined = SelectorInputs("manual", "cpu:2", pipefusion_degree=2)
    assert find_problems(pipelined) == find_problems(pipelined, [PUBLISHED_DEV, ANY_MODEL]) == ()
    in_one_piece = replace(ANY_MODEL, module="HunYuanDiT")
    (problem,) = find_problems(pipelined, [PUBLISHED_DEV, in_one_piece, in_one_piece])
    assert problem.inputs == ("pipefusion_degree",) and "the blocks of this model" in problem.message
    assert problem.nearest == (("pipefusion_degree", 1),)
    heads = SelectorInputs("manual", "cpu:16", tensor_degree=16)
    assert find_problems(heads, [ANY_MODEL]) == ()  # its number of heads is unknown
    (problem,) = find_problems(heads, [PUBLISHED_DEV])
    assert problem.inputs == ("tensor_degree",)
    assert "nearest valid setting is tensor_degree 12" in problem.message


def test_a_model_that_cannot_be_read_is_a_note():
    def refuse(*loader):
        raise CheckpointError("x is refused: it is a VAE.")

    answer = _check(refuse, devices="cpu:2")
    assert answer["problems"] == [] and "it is a VAE" in answer["notes"][0]
    # A run reports the file, and checks the selector's inputs by the rules of any model.
    assert _check(refuse, mode="manual", devices="cpu:5", tensor_degree=5)["problems"] == []


@pytest.mark.parametrize(
    ("inputs", "marked"),
    [
        (SelectorInputs("manual", "cpu:5", ulysses_degree=5), []),
        (SelectorInputs("manual", "cpu:5", tensor_degree=5), []),
        (SelectorInputs("manual", "cpu:5", pipefusion_degree=5), []),
        (SelectorInputs("manual", "cpu:5", cfg_degree=5), [("cfg_degree",)]),
        (SelectorInputs("manual", "cpu:1", ulysses_degree=2), [("ulysses_degree", "devices")]),
        (SelectorInputs("auto", "cpu:1", cfg_degree=64), []),
        (SelectorInputs(devices="gpu7"), [("devices",)]),
    ],
)
def test_without_a_model_only_the_rules_of_any_model_count(inputs, marked):
    """The panel shows what the node does, which refuses what no model can run."""
    shown = check_inputs(inputs, Loader(), lambda *loader: None)
    refused = find_problems(inputs)
    assert [problem["message"] for problem in shown["problems"]] == [problem.message for problem in refused]
    assert [problem.inputs for problem in refused] == marked
    if not refused:
        assert shown["why"] == preview(inputs.settings()).why


def test_defaults_are_those_of_the_settings():
    assert SelectorInputs().settings() == StrategySettings()
    inputs = SelectorInputs("manual", "cpu:2", cfg_degree=2, shard_weights=True, device_shares="2,1")
    assert SelectorInputs.of(inputs.settings()) == inputs


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"inputs": {"ring_degree": float("inf")}}, "ring_degree: expected int"),
        ({"inputs": {"ring_degree": True}}, "ring_degree: expected int"),
        ({"inputs": {"mode": None}}, "mode: expected str"),
        ({"inputs": {"world_size": 2}}, "world_size"),
        ({"inputs": {"devices": "9" * 1001}}, "at most 1000"),
        ({"loader": {"unet_name": "n" * 1001}}, "at most 1000"),
        ({"inputs": []}, r"inputs: expected the fields .* found \[\]"),
        ({"loader": {"path": "/etc/passwd"}}, "/etc/passwd"),
        ({"other": 1}, "'loader'"),
        (None, "the body: expected the fields"),
    ],
)
def test_a_body_that_is_something_else_is_refused_in_words(body, word):
    with pytest.raises(RequestError, match=word):
        read_request(body)


_TEXT = st.one_of(
    st.sampled_from(
        ["auto", "manual", "all", "", "memory", "cpu:8", "3:2", "1,1,1", "nan,inf", "native", "never"]
    ),
    st.from_regex(r"(cpu:)?[0-9٣²,:; .e-]{0,12}", fullmatch=True),
    st.text(max_size=40),
)
_NUMBER = st.one_of(st.sampled_from([1, 2, 3, 4, 8]), st.integers(-1, 65), st.integers())
_KINDS = {str: _TEXT, int: _NUMBER, bool: st.booleans()}
_FIELDS = {name: _KINDS[type(f.default)] for name, f in SelectorInputs.__dataclass_fields__.items()}
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
_BODIES = st.one_of(
    _ANYTHING,
    st.fixed_dictionaries(
        {"inputs": st.fixed_dictionaries({}, optional=_FIELDS) | _ANYTHING},
        optional={"loader": _ANYTHING | st.fixed_dictionaries({"node": _TEXT, "unet_name": _TEXT})},
    ),
    st.fixed_dictionaries(  # valid values, so that the rules meet every combination
        {name: st.integers(*LIMITS[name]) if name in LIMITS else _FIELDS[name] for name in _FIELDS}
    ).map(lambda value: {"inputs": value}),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_BODIES)
def test_any_body_is_answered_or_refused_in_words(body):
    try:
        request = read_request(body)
    except RequestError as error:
        assert str(error) and len(str(error)) < 500
        return
    answer = check_inputs(request.inputs, request.loader, lambda *loader: None)
    assert len(json.dumps(answer, allow_nan=False)) < 64 * 1024
    assert bool(answer["problems"]) != bool(answer["layout"])
    for problem in answer["problems"]:
        assert problem["message"] and set(problem["inputs"]) <= set(SelectorInputs.__dataclass_fields__)


def test_cpu_1_says_that_it_is_one_process_and_which():
    (note, *_) = _check(devices="cpu:1")["notes"]
    assert note.startswith("cpu:1 asks for one process on the CPU, which is called cpu:0;")
    assert not any("cpu:1 asks" in note for note in _check(devices="cpu:2")["notes"])
