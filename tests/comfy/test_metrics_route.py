"""Metrics on ComfyUI's own server, which are off by default and change with each prompt, and the log of the jobs."""

from __future__ import annotations

import itertools
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from any_runs import latents
from graphs import Graph

ROUTE = "/parallel_sampling/metrics"
_SEEDS = itertools.count(701)


def _ask(comfy, path: str = ROUTE, method: str = "GET", **headers: str) -> tuple[int, str]:
    return comfy.request(path, None, method, **headers)


def _set(comfy, value: bool | float, name: str = "metrics") -> None:
    """Changes one of the pack's settings through the route that ComfyUI's Settings use."""
    assert comfy.request(f"/settings/parallel_sampling.{name}", json.dumps(value).encode())[0] == 200


def _sample(comfy) -> str:
    """Samples with a new seed and returns the report."""
    graph = Graph()
    loader = graph.parallel_loader(comfy.write_flux("tiny_metrics.safetensors"), "cpu:2", ulysses=2)
    sampled = graph.parallel_sampler(loader, *graph.request(), seed=next(_SEEDS))
    return latents(comfy, graph, {"ours": sampled})["report"]


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
        (ROUTE, "POST", {}, (405,)),
        (ROUTE, "DELETE", {}, (405,)),
        (ROUTE, "HEAD", {}, (200,)),
        (ROUTE + "?name[]=" + "x" * 6_000, "GET", {}, (200,)),
        (ROUTE + "?" + "x" * 100_000, "GET", {}, (400, 414)),
        (ROUTE + "/../../../etc/passwd", "GET", {}, (403, 404)),
        (ROUTE, "GET", {"Accept": "application/openmetrics-text; version=1.0.0"}, (200,)),
        (ROUTE, "GET", {"Accept-Encoding": "gzip;q=nonsense"}, (200,)),
        (ROUTE, "GET", {"Origin": "https://elsewhere.example"}, (403,)),
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
