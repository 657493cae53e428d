"""Parallel Model in a ComfyUI whose sources the pack does not know tests the model first and gives no wrong picture.

The last test kills this ComfyUI, while the doctor that its page's button starts is at work.
"""

from __future__ import annotations

import contextlib
import http.client
import threading

import psutil
import pytest

from any_runs import compared
from comfy_harness import Comfy, start_comfyui
from comfyui_client import PromptFailed, PromptRejected
from comfyui_copies import IMAGE_BEFORE_TEXT, copy_of_comfyui
from graphs import Graph
from parallel_backend.machine.self_tests import SelfTestStore
from waiting import wait_until

SENTENCE = "this version of ComfyUI computes Flux in another way than the pack knows: only whole images"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Yields (a ComfyUI whose Flux puts the image before the text, the folder that stores the self-tests' outcomes)."""
    folder = tmp_path_factory.mktemp("other")
    copy = copy_of_comfyui(folder / "ComfyUI", IMAGE_BEFORE_TEXT)
    environment = {"PARALLEL_SAMPLING_MEASUREMENTS": str(folder / "kept"), "PARALLEL_TEST_FORKED_RANKS": "1"}
    server = start_comfyui(folder / "base", comfyui=copy, environment=environment)
    with server:
        yield Comfy(server), folder / "kept"


def prompt(comfy, **choice) -> tuple[Graph, dict[str, list]]:
    """Returns a graph and its latents by Parallel Sampler and by stock KSampler."""
    graph = Graph()
    request, stock = graph.request(), graph.model("stock", comfy.write_flux("any_flux.safetensors"))
    parallel = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2", **choice))
    ours = graph.parallel_sampler([parallel, 1], *request, cfg=3.0)
    return graph, {"ours": ours, "stock": graph.ksampler(stock, *request, cfg=3.0)}


@pytest.mark.slow
def test_whole_images_and_prompts_are_shared_out_and_the_report_says_why(other):
    comfy, kept = other
    report = compared(comfy, *prompt(comfy))["report"]
    assert f"note: {SENTENCE}" in report and "Ulysses" not in report.splitlines()[0]
    assert ("rows",) in SelfTestStore(kept).query("SELECT mode FROM outcomes")


@pytest.mark.slow
def test_a_person_who_asks_for_more_is_told(other):
    comfy, _ = other
    graph, ways = prompt(comfy, ulysses=2)
    words = f"(?s)cannot be shared out, only whole.*{SENTENCE}"
    with pytest.raises((PromptFailed, PromptRejected), match=words):
        comfy.sample(graph.prompt, ways["ours"])


def test_no_doctor_outlives_a_killed_comfyui(other):
    comfy, _ = other
    comfy.stop_ranks()

    def press() -> None:
        with contextlib.suppress(http.client.HTTPException, OSError):
            comfy.ask("/parallel_sampling/doctor")  # a client that leaves ends it as well

    def has_ranks() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any("parallel_backend.rank" in " ".join(one.cmdline()) for one in comfy.server.children())
        return False

    button = threading.Thread(target=press, daemon=True)
    button.start()
    wait_until(has_ranks, 120)
    comfy.server.kill()
    assert comfy.server.survivors == []
    button.join(10)
    assert not button.is_alive()  # the request has ended
