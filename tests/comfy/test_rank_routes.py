"""The routes for the ranks and for the check of Strategy Selector get valid and invalid requests; those for pages serve
no other site. Metrics, off by default, change with each prompt, and so does the log of the jobs."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from any_runs import sampled
from parallel_backend.observability.preview.form import LIMITS, SelectorInputs

ROUTE = "/parallel_sampling/ranks"
WATCH = "/parallel_sampling/watch"
ACTIONS = ("sleep", "wake", "restart", "stop", "reset")
CHECK = "/parallel_sampling/check_strategy"
ELSEWHERE = (
    {"Origin": "https://elsewhere.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "elsewhere.example", "Origin": "http://elsewhere.example"},  # a name that resolves to 127.0.0.1
)
# Routes that answer only ComfyUI's own page, by method.
OF_PAGES = {
    "POST": [
        *(f"{ROUTE}/{action}" for action in ACTIONS),
        *(f"/parallel_sampling/{name}" for name in ("watch", "preload", "doctor", "gpu_check", "drain")),
        CHECK,
    ],
    "GET": ["/parallel_sampling/health", "/parallel_sampling/devices?text=all", "/parallel_sampling/runs"],
}
GROUP = {"devices": ["cpu:0", "cpu:1"]}
_SEEDS = itertools.count(1)  # a new seed per run, so that no cached output answers


@pytest.fixture
def warm(measuring):
    """A ComfyUI whose ranks hold a model."""
    unet = measuring.write_flux("tiny_ranks.safetensors", single_blocks=5)
    sampled(measuring, unet, {"seed": next(_SEEDS)}, ulysses=2)
    return measuring


def _group(comfy) -> dict:
    (group,) = comfy.groups()
    return group


def test_each_button_does_what_it_says_and_refuses_where_it_makes_no_sense(warm):
    def press(action):
        status, said = warm.ask(f"{ROUTE}/{action}", GROUP)
        return status, said.get("error", "") if status != 200 else said["groups"][0]["state"]

    held = _group(warm)
    assert (held["state"], held["models"], len(held["ranks"])) == ("ready", ["tiny_ranks.safetensors"], 2)
    assert all(rank["weight_bytes"] > 0 and rank["pid"] for rank in held["ranks"])
    assert press("wake") == (409, "the processes are awake")
    assert press("sleep") == (200, "asleep")
    assert press("wake") == (200, "ready") and _group(warm)["models"] == held["models"]
    pids = {rank["pid"] for rank in held["ranks"]}
    assert press("restart") == (200, "ready")
    assert not pids & {rank["pid"] for rank in _group(warm)["ranks"]}
    assert press("stop") == (200, "down")
    assert press("stop")[0] == press("reset")[0] == 409
    assert warm.ask(f"{ROUTE}/stop", {"devices": ["cpu:0"]})[0] == 404


def test_nothing_from_elsewhere_and_no_nonsense_does_harm(warm):
    """Other sites, other methods and bodies without sense get a 4xx, and the ranks stay as they are."""
    before = _group(warm)
    watch = {"client_id": "nobody", "looking": True, "anew": True}
    for path, body in itertools.product(OF_PAGES["POST"], (GROUP, watch)):
        for headers in ELSEWHERE:
            assert warm.ask(path, body, **headers)[0] == 403
        for method in ("GET", "PUT", "DELETE"):
            assert warm.ask(path, body, method=method)[0] in (404, 405), path
    for path, headers in itertools.product(OF_PAGES["GET"], ELSEWHERE):
        assert warm.ask(path, method="GET", **headers)[0] == 403
    assert warm.ask(CHECK, b"{}", Host="localhost", Origin="http://localhost")[0] == 200
    assert warm.ask(WATCH, watch)[0] == 409  # this page has no websocket

    wrong = (None, True, 1e300, "", "\x00\u2028😀", "x" * 300, [], [[["cpu:0"]]], {}, {"x": ["cpu:0"]})
    values = [*wrong, *({"devices": value} for value in wrong)]
    values += [watch | {name: value} for name in watch for value in wrong]
    bodies = [json.dumps(value).encode() for value in values]
    bodies += [b"", b"{", b"[" * 900, b'"\xff"', b"1" * 900, b"NaN", b" " * 5000, b"[" * 100_000]
    bodies += [
        b'{"devices": ["cpu:0", "cpu:1"], "devices": []}',
        b'{"client_id": "\\ud800", "looking": true, "anew": true}',
    ]
    for path, body in itertools.product([*(f"{ROUTE}/{action}" for action in ACTIONS), WATCH], bodies):
        status, said = warm.ask(path, body)
        assert 400 <= status < 500 and said["error"], (path, body)
    after = _group(warm)
    assert after["state"] == "ready"
    assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in before["ranks"]]


def _check(comfy, inputs: dict, **loader: str) -> dict:
    status, said = comfy.ask(CHECK, {"inputs": inputs, "loader": loader})
    assert status == 200
    return said


def test_the_check_takes_what_the_node_has(comfy):
    schema = comfy.client.object_info()["StrategySelector"]["input"]
    inputs = {**schema["required"], **schema["optional"]}
    assert {name: options["default"] for name, (_, options) in inputs.items()} == asdict(SelectorInputs())
    assert {n: (o["min"], o["max"]) for n, (_, o) in inputs.items() if "min" in o} == LIMITS


def test_the_rules_are_those_of_the_loaders_model(comfy, unet):
    inputs = {"mode": "manual", "devices": "cpu:16", "ulysses_degree": 16}
    named = {"unet_name": unet}
    for loader, model in (
        ({"node": "ParallelFluxLoader"} | named, unet),
        ({"node": "ParallelModelLoader"} | named, unet),
        ({"node": "ParallelModel", "source": "UNETLoader"} | named, unet),
        ({"node": "ParallelDemoLoader"}, "transformer.safetensors"),
    ):
        (problem,) = _check(comfy, inputs, **loader)["problems"]
        assert problem["inputs"] == ["ulysses_degree"]
        assert re.search(rf"\d attention heads of {model}", problem["message"])
    assert _check(comfy, inputs, node="ParallelModel")["problems"] == []  # it may be any model


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "no such file.safetensors", ""])
def test_a_name_that_no_loader_offers_reads_no_file(comfy, name):
    said = _check(comfy, {"devices": "cpu:2"}, node="ParallelFluxLoader", unet_name=name)
    assert said["basis"].startswith("Plan for Flux.1.") and said["notes"] == []


def test_what_is_no_form_is_answered_in_words_and_starts_nothing(comfy):
    """tests/observability/preview/test_form.py has the forms that are refused."""
    groups = comfy.groups()
    for body in (b"\xff\x00", b"[" * 10_000, b'{"inputs": {"unknown": 1}}', b" " * 1_000_000):
        status, said = comfy.ask(CHECK, body)
        assert status == 400 and len(said["error"]) < 500, body[:50]
    assert _check(comfy, {"devices": "\ud800"})["problems"]
    assert comfy.groups() == groups


METRICS = "/parallel_sampling/metrics"


def _ask(comfy, path: str = METRICS, method: str = "GET", **headers: str) -> tuple[int, str]:
    return comfy.request(path, None, method, **headers)


def _set(comfy, value: bool | float, name: str = "metrics") -> None:
    """Changes one of the pack's settings through the route that ComfyUI's Settings use."""
    assert comfy.request(f"/settings/parallel_sampling.{name}", json.dumps(value).encode())[0] == 200


def _sample(comfy) -> str:
    """Samples with a new seed and returns the report."""
    unet = comfy.write_flux("tiny_metrics.safetensors")
    return sampled(comfy, unet, {"seed": next(_SEEDS)}, ulysses=2)[1]


def _values(text: str) -> dict[tuple[str, frozenset], float]:
    return {
        (one.name.removeprefix("parallel_sampling_"), frozenset(one.labels.values())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@pytest.fixture
def on(comfy):
    assert _ask(comfy)[0] == 404
    _set(comfy, True)
    yield comfy
    _set(comfy, False)
    assert _ask(comfy)[0] == 404


def test_off_the_answer_says_how_to_turn_them_on(comfy):
    status, text = _ask(comfy)
    assert status == 404 and "Settings" in text and "PARALLEL_SAMPLING_METRICS=on" in text


def test_on_they_move_with_each_prompt(on):
    before = _values(_ask(on)[1])
    _sample(on)
    status, text = _ask(on)
    after = _values(text)
    done = "jobs_total", frozenset({"sample", "done"})
    assert status == 200 and after[done] == before[done] + 1
    assert after["images_total", frozenset({"sample", "Ulysses 2", "tiny_metrics.safetensors"})] == 1
    assert after["step_seconds_count", frozenset({"Ulysses 2"})] >= 1
    assert after["device_memory_bytes", frozenset({"cpu:1", "weights"})] > 0
    assert after["sent_bytes_total", frozenset({"cpu:0"})] > 0
    assert str(on.server.base_directory) not in text


def test_strange_requests_get_an_answer_and_other_pages_none(on):
    for path, method, headers, expected in (
        (METRICS, "POST", {}, (405,)),
        (METRICS, "DELETE", {}, (405,)),
        (METRICS, "HEAD", {}, (200,)),
        (METRICS + "?name[]=" + "x" * 6_000, "GET", {}, (200,)),
        (METRICS + "?" + "x" * 100_000, "GET", {}, (400, 414)),
        (METRICS + "/../../../etc/passwd", "GET", {}, (403, 404)),
        (METRICS, "GET", {"Accept": "application/openmetrics-text; version=1.0.0"}, (200,)),
        (METRICS, "GET", {"Accept-Encoding": "gzip;q=nonsense"}, (200,)),
        (METRICS, "GET", {"Origin": "https://elsewhere.example"}, (403,)),
    ):
        assert _ask(on, path, method, **headers)[0] in expected, (path[:60], method, headers)


def test_a_price_in_the_settings_is_told_in_the_report_and_the_log_has_it_per_prompt(on):
    _set(on, 3600.0, "price_per_gpu_hour")
    try:
        report = dict(line.split(": ", 1) for line in _sample(on).splitlines())
        assert _values(_ask(on)[1])["price_per_device_hour", frozenset()] == 3600
    finally:
        _set(on, 0, "price_per_gpu_hour")
    paid = [line for line in on.logged() if line["event"] == "ended" and "cost" in line][-1]
    (seconds,) = (value for name, value in report.items() if name == "GPU time used")
    assert paid["cost"] == paid["device_seconds"] == pytest.approx(float(seconds.split()[0]), abs=0.5)
    assert report["cost"].endswith("at 3600 per GPU-hour (Settings, Parallel Sampling)")
    assert paid["prompt_id"] in json.loads(_ask(on, "/history")[1])


def test_the_log_that_a_variable_asks_for_has_the_jobs_as_lines_of_json(comfy):
    _sample(comfy)
    lines = comfy.logged()
    assert {"loaded", "stepped", "ended"} <= {line["event"] for line in lines}
    done = [line for line in lines if (line.get("request"), line.get("result")) == ("sample", "done")]
    assert done and done[-1]["devices"] == ["cpu:0", "cpu:1"] and done[-1]["images"] == 1
    assert str(comfy.server.base_directory) not in json.dumps(lines)
