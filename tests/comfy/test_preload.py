"""A model is loaded ahead of its first prompt, on a person's request or in the tail of the prompt before it."""

from __future__ import annotations

import json

import pytest

from comfyui_client import PromptInterrupted
from differences import relative_difference
from graphs import STOCK, Graph
from pages import choose, menu_of, one_sampler, set_widgets, show_prompt, words_of
from waiting import wait_until

ROUTE = "/parallel_sampling/preload"
FILES = ("hot_a.safetensors", "hot_b.safetensors")
EXACT = 1e-5  # relative to the largest value
ROUNDS = 2  # prompts for each model


def _files(comfy) -> tuple[str, ...]:
    return tuple(comfy.write_flux(name, single_blocks=2 + number) for number, name in enumerate(FILES))


def _sampled(loader: str | None, file: str, seed: int) -> tuple[Graph, list]:
    """Returns (graph, LATENT output). `loader`: the class of our loader, or None for UNETLoader and KSampler."""
    graph = Graph()
    request = graph.request()
    if loader is None:
        return graph, graph.ksampler(graph.model(STOCK, file), *request, seed=seed)
    choice = {} if loader == "ParallelModelLoader" else {"ulysses": 2}
    model = graph.loaded_by(loader, file, graph.strategy("cpu:2", **choice))
    return graph, graph.parallel_sampler(model, *request, seed=seed)


def _node(graph: Graph, kind: str) -> str:
    return next(name for name, node in graph.prompt.items() if node["class_type"] == kind)


class _Log:
    """A reader of the jobs' log that reports only what happens after it was created."""

    def __init__(self, comfy) -> None:
        self._comfy, self._skipped = comfy, len(comfy.logged())

    def requests(self, count: int) -> list[tuple[str, bool]]:
        """Waits for `count` samplings and preloads and returns (kind, True if it loaded a model itself) for each."""

        def read() -> list[tuple[str, bool]]:
            found, loaded = [], False
            for line in self._comfy.logged()[self._skipped :]:
                loaded |= line["event"] == "loaded"
                if line["event"] == "ended" and line["request"] in ("sample", "preload"):
                    found.append((line["request"], loaded))
                    loaded = False
            return found

        wait_until(lambda: len(read()) >= count)
        return read()[:count]


@pytest.fixture
def idle(comfy):
    """A ComfyUI whose ranks hold no model and whose nodes have no cached outputs."""
    comfy.forget()
    wait_until(lambda: not any(group["models"] for group in comfy.groups()))
    comfy.client.free()  # also collects outputs with MODELs that the first free() left in reference cycles
    return comfy


@pytest.mark.parametrize("loader", ["ParallelFluxLoader", "ParallelModelLoader", "ParallelModel"])
def test_a_preloaded_model_s_first_prompt_does_not_load_it(idle, loader):
    _, file = _files(idle)
    log = _Log(idle)
    graph, latent = _sampled(loader, file, seed=len(loader))
    body = {"prompt": graph.prompt, "node": _node(graph, loader)}
    status, told = idle.ask(ROUTE, body)
    assert (status, told["model"], told["was_there"]) == (200, file, False)
    assert told["devices"] == ["cpu:0", "cpu:1"]
    status, told = idle.ask(ROUTE, body)
    assert (status, told["was_there"], told["seconds"]) == (200, True, 0.0)
    assert idle.sample(graph.prompt, latent).isfinite().all()
    assert log.requests(3) == [("preload", True), ("preload", False), ("sample", False)]


def test_what_cannot_be_loaded_is_told_and_nothing_is_lost(idle):
    file, other = _files(idle)
    graph, latent = _sampled("ParallelFluxLoader", file, seed=40)
    loader = _node(graph, "ParallelFluxLoader")
    assert idle.ask(ROUTE, {"prompt": graph.prompt, "node": loader})[0] == 200

    def refused(change, node: str = loader) -> str:
        prompt = json.loads(json.dumps(graph.prompt))
        change(prompt)
        status, told = idle.ask(ROUTE, {"prompt": prompt, "node": node})
        assert status == 409, told
        return told["error"]

    def inputs(**changes):
        return lambda prompt: prompt[loader]["inputs"].update(changes)

    assert "nowhere.safetensors" in refused(inputs(unet_name="nowhere.safetensors"))
    assert "unet_name comes from another node" in refused(inputs(unet_name=["12", 0]))
    assert "weight_dtype is 'float3'" in refused(inputs(weight_dtype="float3"))
    assert "The strategy comes from UNETLoader" in refused(
        lambda prompt: prompt[_node(graph, "StrategySelector")].update(class_type="UNETLoader")
    )
    assert "This strategy cannot run" in refused(
        lambda prompt: prompt[_node(graph, "StrategySelector")]["inputs"].update(ulysses_degree=3)
    )
    assert "no node 99" in refused(lambda prompt: None, node="99")
    assert "names no model" in refused(lambda prompt: None, node=latent[0])
    behind, _ = _sampled("ParallelModel", other, seed=41)
    stock = {"prompt": behind.prompt, "node": _node(behind, "UNETLoader")}
    assert "UNETLoader names no model for the devices" in idle.ask(ROUTE, stock)[1]["error"]
    behind.prompt[_node(behind, "UNETLoader")]["class_type"] = "LoaderOfSomePack"
    status, told = idle.ask(ROUTE, {"prompt": behind.prompt, "node": _node(behind, "ParallelModel")})
    assert status == 409 and "Its first prompt loads it" in told["error"]
    for body in (b"[", b"{}", {"prompt": {"1": {}}, "node": "1"}, {"prompt": graph.prompt, "node": 1}):
        assert idle.ask(ROUTE, body)[0] == 400
    assert idle.ask(ROUTE, b" " * (4 * 2**20 + 1))[0] == 400
    log = _Log(idle)
    idle.sample(graph.prompt, latent)
    assert log.requests(1) == [("sample", False)]


def test_while_a_prompt_samples_nothing_is_loaded_beside_it(idle):
    file, other = _files(idle)
    graph, latent = _sampled("ParallelFluxLoader", file, seed=50)
    graph.prompt[latent[0]]["inputs"]["steps"] = 4000
    wanted, _ = _sampled("ParallelFluxLoader", other, seed=51)
    body = {"prompt": wanted.prompt, "node": _node(wanted, "ParallelFluxLoader")}
    answers = []

    def ask_and_end_it() -> None:
        answers.append(idle.ask(ROUTE, body))
        idle.client.interrupt()

    with idle.amid(latent[0], ask_and_end_it), pytest.raises(PromptInterrupted):
        idle.sample(graph.prompt, latent)
    assert answers == [(409, {"error": "a prompt that uses the devices is running; its turn comes first"})]


def test_waiting_prompts_switch_models_and_none_of_them_loads_or_fails(idle):
    """The tail of each prompt lasts until the next one's model is loaded, like the decode of a large picture."""
    files = _files(idle)
    wanted = [(files[number % 2], 60 + number) for number in range(2 * ROUNDS)]
    expected = []
    for file, seed in wanted:
        stock, latent = _sampled(None, file, seed)
        expected.append(idle.sample(stock.prompt, latent))
    log = _Log(idle)
    graphs = []
    for number, (file, seed) in enumerate(wanted):
        graph, latent = _sampled("ParallelFluxLoader", file, seed)
        if number + 1 < len(wanted):
            latent = [graph.add("TestUntilHeld", latent=latent, file=wanted[number + 1][0]), 0]
        graph.save(latent, f"hot-{number}.safetensors")
        graphs.append(graph)
    for name in [idle.client.queue(graph.prompt) for graph in graphs]:
        assert idle.client.wait(name)["status"]["status_str"] == "success"
    for number, latent in enumerate(expected):
        found = idle.tensor(f"hot-{number}.safetensors")
        assert relative_difference(found, latent) < EXACT
    assert relative_difference(expected[0], expected[2]) > 1000 * EXACT  # another seed gives another latent
    requests = log.requests(2 * len(wanted) - 1)
    samplings = [loaded for request, loaded in requests if request == "sample"]
    assert samplings == [True] + [False] * (len(wanted) - 1)
    assert sum(loaded for request, loaded in requests if request == "preload") == len(wanted) - 1


def test_without_the_setting_the_next_prompt_loads_its_own_model(idle):
    def preload_next(value: bool) -> None:
        body = json.dumps(value).encode()
        assert idle.request("/settings/parallel_sampling.preload_next", body)[0] == 200

    preload_next(False)
    try:
        log = _Log(idle)
        names = []
        for number, file in enumerate(_files(idle)):
            graph, latent = _sampled("ParallelFluxLoader", file, seed=80 + number)
            graph.save(latent, "cold.safetensors")
            names.append(idle.client.queue(graph.prompt))
        for name in names:
            idle.client.wait(name)
        assert log.requests(2) == [("sample", True), ("sample", True)]
    finally:
        preload_next(True)


UNET = "tiny_preload.safetensors"
MODELS = {UNET: 3}


def test_preload_says_what_it_did_and_why_it_could_not(page, measuring):
    measuring.stop_ranks()  # a preload would be refused if it had to end other ranks
    words = words_of()
    show_prompt(page, one_sampler(UNET, ulysses=2).prompt, "ParallelFluxLoader")
    assert words["preload"] not in menu_of(page, "ParallelSampler")

    def preload(said: str) -> None:
        choose(page, "ParallelFluxLoader", words["preload"])
        page.get_by_text(said).first.wait_for()

    preload(words["preloaded"].format(model=UNET, devices="cpu:0, cpu:1"))
    preload(words["preload_held"].format(model=UNET, devices="cpu:0, cpu:1"))
    set_widgets(page, "ParallelFluxLoader", unet_name="nowhere.safetensors")
    preload("nowhere.safetensors")
    page.evaluate("() => { app.graph.nodes.find(n => n.type === 'ParallelFluxLoader').mode = 2; }")
    preload(words["preload_off"])
