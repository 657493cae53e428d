"""The report's words on what a prompt used the devices for."""

from dataclasses import replace

from parallel_backend.observability.prompt_phases import MOST_PROMPTS, PromptPhases
from parallel_backend.requests import LoadInfo, RunInfo
from parallel_backend.sidecar.group.events import Changed, RequestEnded
from parallel_backend.strategy import ParallelStrategy

DEVICES = ("cpu:0", "cpu:1")


def ended(request, seconds, prompt="one", result="done", loading=None):
    info = None
    if loading is not None:
        load = LoadInfo(loading, 1, cached=False, dtype="bfloat16", compute_dtype="float32")
        info = replace(RunInfo("native", ParallelStrategy(), (), (0, 0), ()), load=load)
    return RequestEnded(DEVICES, request, result, seconds, None, info, None, 1, prompt_id=prompt)


def phases_after(*events):
    phases = PromptPhases()
    for event in events:
        phases.on_event(event)
    return phases


def test_phases_have_their_seconds_and_shares_and_a_load_is_one():
    phases = phases_after(
        Changed(DEVICES),
        ended("text", 0.25),
        ended("text", 0.25),
        ended("sample", 4.0, loading=1.0),
        ended("decode", 0.5),
        ended("sample", 100.0, prompt="another"),
        ended("sample", 100.0, prompt=""),
        ended("decode", 100.0, result="cancelled"),
        ended("sleep", 100.0),
    )
    assert phases.in_words("one") == [
        "this prompt on the devices: 5 s so far: text 0.5 s (10%), loading 1 s (20%), sampling 3 s (60%), "
        "decoding 0.5 s (10%)"
    ]


def test_a_prompt_that_only_samples_has_no_line_and_old_ones_are_forgotten():
    phases = phases_after(ended("sample", 4.0, loading=1.0))
    assert phases.in_words("one") == phases.in_words("none") == []
    phases.on_event(ended("text", 1.0))
    assert phases.in_words("one")
    for number in range(MOST_PROMPTS):
        phases.on_event(ended("text", 1.0, prompt=str(number)))
    assert phases.in_words("one") == [] and phases.in_words("0")


def test_what_the_steps_won_counts_against_the_whole_prompt():
    phases = PromptPhases()
    phases.add_gain("one", 100.0)  # the prompt is not known yet
    for event in (ended("text", 1.0), ended("sample", 2.0, loading=0.5), ended("decode", 1.0)):
        phases.on_event(event)
    assert phases.spent("one") == {"text": 1.0, "load": 0.5, "sample": 1.5, "decode": 1.0}
    assert phases.with_and_without_gain("one") == (0.0, 0.0)  # one device's time is unknown
    phases.add_gain("one", 0.5)
    phases.add_gain("one", 1.5)  # from another sampler
    assert phases.with_and_without_gain("one") == (4.0, 6.0)
    phases.on_event(ended("sample", 2.0, prompt="two"))
    phases.add_gain("two", 1.0)
    assert phases.spent("two") == {} and phases.with_and_without_gain("two") == (0.0, 0.0)
