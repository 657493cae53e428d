"""The report's sentences: all give the same number for the same thing, in words that a person would use."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jobs import flux_job
from pack_nodes import import_node_module
from parallel_backend.observability.prompt_phases import PromptPhases
from parallel_backend.planner.rules import Plan
from parallel_backend.planner.step_bounds import bytes_sent
from parallel_backend.planner.store import LinkRate
from parallel_backend.requests import LoadInfo, RunInfo
from parallel_backend.sidecar.group.events import RequestEnded
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import Trial

report = speed = import_node_module("nodes.runs.report")
ULYSSES = ParallelStrategy(ulysses_degree=2)


@pytest.fixture(autouse=True)
def _comfyui(comfyui_here):
    """A RunRecord is imported together with ComfyUI."""


def record(strategy=ULYSSES, plan=None, **changes):
    """Returns the RunRecord of a run of four steps, the first of which was slow."""
    run = RunInfo("native", strategy, step_seconds=(0.9, 0.05, 0.04, 0.06), held_seconds=1.5)
    found = import_node_module("nodes.host.calls").RunRecord([plan or planned()], [run], prompt_id="")
    return replace(found, **changes)


def lines(**changes) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in report.write_report(record(**changes)).splitlines())


def planned(job=None, link=None, **step_s):
    """Returns a plan whose candidates were measured earlier. `step_s`: seconds of a step by `one` and `ulysses`."""
    strategies = {"one": ParallelStrategy(), "ulysses": ULYSSES}
    candidates = [SimpleNamespace(strategy=strategies[name], step_s=s) for name, s in step_s.items()]
    return Plan(job or flux_job(), ("cpu:0", "cpu:1"), ULYSSES, candidates=candidates, link=link)


def test_all_words_tell_one_median_which_leaves_out_the_first_step():
    told = lines(plan=planned(ulysses=0.04))
    assert told["step"] == "median 0.05 s, first 0.9 s, 4 in all"
    assert told["expected"] == "0.04 s per step (measured earlier); this run took 25% more"
    assert lines(plan=planned(ulysses=0.0501))["expected"].endswith("this run took the same")
    assert report.summarise(record()) == "Ulysses 2: 0.05 s per step"
    assert speed.usual([0.3], 0) == 0.3


@pytest.mark.parametrize(
    ("seconds", "one_device", "words"),
    [
        (0.05, 0.09, "1.8 × as fast as one device"),
        (2.24, 1.88, "16 % slower than one device"),
        (1.0, 1.06, "6 % faster than one device"),
        (1.0, 1.015, "as fast as one device"),
        (1.0, None, "not compared"),
        (1.0, 0.0, "not compared"),
        (0.50049, 0.90049, "1.8 × as fast as one device"),
    ],
)
def test_a_speed_is_said_in_one_sentence_by_all(seconds, one_device, words):
    assert speed.compare_with_one_device(seconds, one_device) == words
    one = () if not one_device else (Trial(ParallelStrategy(), (one_device,)),)
    trials = (Trial(ULYSSES, (seconds,)), *one)
    ran = record(runs=[RunInfo("native", ULYSSES, step_seconds=(9.0, seconds), trials=trials)])
    assert report.badge(ran)["compared"] == words and report.headline(ran).split(" · ")[2] == words


def test_steps_of_other_strategies_that_the_run_tried_are_no_part_of_its_time():
    trials = (Trial(ULYSSES, (0.1, 0.1, 0.1, 0.1)), Trial(ParallelStrategy(), (0.4, 0.2)))
    times = (0.9, 0.1, 0.1, 0.1, 0.4, 0.2, 0.2, 0.1, 0.1)
    ran = record(runs=[RunInfo("native", ULYSSES, step_seconds=times, trials=trials)])
    assert report.badge(ran)["seconds"] == 0.1
    assert report.headline(ran).startswith(
        "2 devices (Ulysses) · 0.1 s per step · 2.0 × as fast as one device"
    )


def test_an_earlier_time_counts_only_while_the_machine_is_as_busy_as_then():
    calm = record(plan=planned(ulysses=0.051, one=0.09))
    assert report.badge(calm)["compared"] == "1.8 × as fast as one device"
    busy = record(plan=planned(ulysses=0.02, one=0.04))
    assert report.badge(busy)["compared"] == "not compared"
    assert report.badge(record(plan=planned(one=0.09)))["compared"] == "not compared"


def test_where_the_time_went_is_said_of_the_latest_run():
    run = RunInfo("native", ULYSSES, (1.0, 1.0), inside_seconds=((0.1, 0.1), (0.1, 0.1)))
    earlier = RunInfo("native", ULYSSES, (9.0,), inside_seconds=((8.0,), (8.0,)))
    assert lines(runs=[earlier, run])["timeline"] == (
        "devices computed 90% of the time, sent 10% and waited for each other 0%"
    )
    assert "timeline" not in lines()


def test_the_headline_says_what_ran_how_fast_and_whether_the_picture_is_the_same():
    words = "2 devices (Ulysses) · 0.05 s per step · not compared · same picture as one device"
    assert report.headline(record()) == words
    near = RunInfo("native", ULYSSES, step_seconds=(0.05,), exact=False)
    assert report.headline(record(runs=[near])).endswith(" · close to the picture of one device")
    alone = RunInfo("native", ParallelStrategy(), step_seconds=(0.1,))
    words = report.headline(record(runs=[alone]))
    assert words == "one device · 0.1 s per step"


def test_strategies_of_several_axes_are_told_with_their_degrees():
    both = ParallelStrategy(cfg_degree=2, ulysses_degree=2)
    assert report.devices_and_split(record(both)) == "4 devices (CFG 2 × Ulysses 2)"


@pytest.mark.parametrize(("patched", "words"), [(1, "1 weight changed"), (6, "6 weights changed")])
def test_weights_are_counted_as_a_person_would(patched, words):
    assert lines(patched=patched)["LoRA"] == words
    assert "LoRA" not in lines()


def test_a_load_is_told_with_its_time_and_only_without_one_as_none():
    def told(seconds, *, cached=False):
        load = LoadInfo(seconds, 10, cached, "float32", "float32")
        return lines(runs=[RunInfo("native", ULYSSES, (0.9,), load=load)])["load"]

    assert lines()["load"] == told(0.1, cached=True) == "0 s (weights were warm)"
    assert told(0.004) == "0.004 s" and told(2.5) == "2.50 s"


def test_what_a_run_cost_is_told_in_device_seconds_and_with_a_price_in_money():
    told = lines()
    assert told["GPU time used"] == "3 s (starting and loading included)" and "cost" not in told
    assert lines(price_per_hour=12.0)["cost"] == "0.01, at 12 per GPU-hour (Settings, Parallel Sampling)"
    told = lines(plan=planned(flux_job(batch=4)), price_per_hour=12.0)
    assert told["GPU time used"] == "3 s for 4 images, 0.75 s each (starting and loading included)"
    assert told["cost"].startswith("0.01 for 4 images, 0.0025 each, at 12")


def test_a_step_cache_tells_what_it_did():
    runs = [RunInfo("native", ULYSSES, (0.5, 0.5), exact=False, model_calls=2, reused_calls=1)]
    changed = record(runs=runs, cache_threshold=0.1)
    assert "step cache: 1 of 2 model calls reused" in report.write_report(changed)
    assert report.summarise(changed) == "Ulysses 2: 0.5 s per step on average, 1 of 2 model calls reused"


@pytest.fixture
def a_prompt(monkeypatch):
    """The phases of a prompt that took 1 s for texts and 3 s for sampling."""
    phases = PromptPhases()
    for request, seconds in (("text", 1.0), ("sample", 3.0)):
        phases.on_event(RequestEnded((), request, "done", seconds, None, None, None, 1, prompt_id="one"))
    monkeypatch.setattr(report, "PHASES", phases)
    monkeypatch.setattr(speed, "PHASES", phases)
    return phases


def test_the_speed_of_the_whole_prompt_stands_beside_that_of_its_steps(a_prompt):
    """Four steps of 0.05 s instead of 1.05 s save 4 s of 8."""
    ran = record(plan=planned(one=1.05, ulysses=0.05), prompt_id="one")
    speed.count_gain(ran)
    told = report.headline(ran).split(" · ")
    assert told[2:4] == [
        "21.0 × as fast as one device",
        "whole prompt so far: 2.0 × as fast as one device",
    ]
    assert report.phases_in_words("one") == [
        "this prompt on the devices: 4 s so far: text 1 s (25%), sampling 3 s (75%)",
        "whole prompt so far: 2.0 × as fast as one device",
    ]


def test_where_nobody_knows_what_one_device_takes_the_prompt_is_not_compared(a_prompt):
    ran = record(prompt_id="one")
    speed.count_gain(ran)
    assert speed.compare_prompt("one") == "" and len(report.phases_in_words("one")) == 1
    assert "whole prompt" not in report.headline(ran)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [("sage", "attention sage quantises"), ("torch", "a note says why")],
    ids=["a kernel", "layers that scale by a device's largest value"],
)
def test_a_result_that_is_approximate_is_called_so_with_its_own_reason(kernel, words):
    """Runs in ComfyUI show the reasons of PipeFusion, of a step cache and of rounded exchanges."""
    found = RunInfo("native", ULYSSES, step_seconds=(0.1,), exact=False, kernel=kernel)
    assert lines(runs=[found])["result"].startswith(f"approximate ({words}")


def test_what_the_links_foresaw_stands_beside_what_was_measured():
    """The foreseen step is half of one device's step plus the exchanges, at the rate that the doctor measured."""
    job = flux_job()
    link = LinkRate("", bytes_sent(job, ULYSSES) / 0.02, 1e-5, 0.0)  # so exchanges take 20 ms
    told = lines(plan=planned(job, link, one=0.1, ulysses=0.05))
    factor = 0.1 / (0.1 / 2 + 0.02 + 2 * 57 * 1e-5)
    assert told["foreseen"] == f"{factor:.1f} × by the links alone, measured: 2.0 × as fast as one device"
    assert "foreseen" not in lines(plan=planned(one=0.1, ulysses=0.05)), "nobody examined the links"
    assert lines(plan=planned(job, link, ulysses=0.05))["foreseen"] == (
        f"by the links alone faster where one device takes more than {2 * (0.02 + 2 * 57 * 1e-5):.2g} s per step"
    ), "nobody knows one device"
