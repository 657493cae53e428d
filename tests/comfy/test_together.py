"""Waiting prompts that differ by their seed, computed at once: each gives the latent, the file and the place in the
history that it has alone; none is lost to a cancel, an edited queue or a prompt that fails."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from comfyui_client import PromptFailed, PromptInterrupted
from differences import relative_difference
from graphs import STOCK, Graph

UNET = "tiny_together.safetensors"
EXACT = 1e-5  # of the largest value
TOGETHER = "prompts that differ by their seed were computed at once"
TAKEN = "computed at once with the prompt before it"
ALONE = "one image per GPU was not possible"
_names = itertools.count()


class _Prompts:
    """Prompts of one graph, whose sampler begins once all of them are there."""

    def __init__(
        self, comfy, count: int, *, loader: str = "ParallelFluxLoader", devices: str = "cpu:2", **sampler
    ):
        self.comfy, self.count = comfy, count
        self.loader, self.devices, self.sampler = loader, devices, {"steps": 3, **sampler}
        self.batch = f"together-{next(_names)}"
        self.ids: list[str] = []
        self._log = Path(comfy.server.base_directory, "ranks.jsonl")
        self._skipped = self._lines()
        self.graph(0)  # which names the sampler's node

    def _lines(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def graph(self, seed: int) -> Graph:
        comfy, graph = self.comfy, Graph()
        file = comfy.write_flux(UNET)
        if self.loader == "ParallelFluxLoader":
            model = [graph.parallel_loader(file, self.devices), 0]
        else:
            strategy = graph.strategy(self.devices)
            model = [graph.add(self.loader, model=graph.model(STOCK, file), strategy=strategy), 1]
        request = (
            graph.text(1),
            graph.text(2),
            graph.latent(draw=4, noise_mask=self.sampler.get("denoise", 1) < 1),
        )
        wait = graph.add("TestUntilWaiting", latent=request[2], prompts=self.count - 1, name=self.batch)
        self.node, _ = graph.parallel_sampler(model, *request[:2], [wait, 0], seed=seed, **self.sampler)
        graph.save([self.node, 0], self.file(seed))
        graph.add("TestSaveText", text=[self.node, 1], path=f"{self.batch}-{seed}.txt")
        return graph

    def file(self, seed: int) -> str:
        return f"{self.batch}-{seed}.safetensors"

    def put(self, *seeds: int) -> None:
        for seed in seeds:
            self.ids.append(self.comfy.client.queue(self.graph(seed).prompt))

    def wait(self) -> list[dict]:
        return [self.comfy.client.wait(one) for one in self.ids]

    def latent(self, seed: int) -> torch.Tensor:
        return load_file(self.comfy.output(self.file(seed)))["samples"]

    def report(self, seed: int) -> str:
        return self.comfy.output(f"{self.batch}-{seed}.txt").read_text()

    def samplings(self) -> int:
        """Jobs that the ranks were asked for."""
        lines = map(json.loads, self._log.read_text().splitlines()[self._skipped :])
        return sum(line["event"] == "ended" and line["request"] == "sample" for line in lines)

    def expect(self, *seeds: int) -> None:
        """Each latent is that of a stock KSampler alone."""
        for seed in seeds:
            graph = Graph()
            latent = graph.latent(draw=4, noise_mask=self.sampler.get("denoise", 1) < 1)
            stock = graph.ksampler(
                graph.model(STOCK, UNET), graph.text(1), graph.text(2), latent, seed=seed, **self.sampler
            )
            assert relative_difference(self.latent(seed), self.comfy.sample(graph.prompt, stock)) < EXACT, (
                seed
            )


@pytest.fixture
def together(comfy):
    """A ComfyUI whose user wants one image per GPU."""
    settings = comfy.server.base_directory / "user" / "default" / "comfy.settings.json"
    before = settings.read_text() if settings.exists() else "{}"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({**json.loads(before), "parallel_sampling.one_image_per_gpu": True}))
    yield comfy
    settings.write_text(before)


@pytest.mark.parametrize(
    ("loader", "sampler"),
    [
        ("ParallelFluxLoader", {"denoise": 0.7}),
        ("ParallelModel", {"cfg": 2.5, "sampler_name": "uni_pc", "denoise": 0.7}),
    ],
)
def test_each_prompt_gives_what_it_gives_alone_in_half_as_many_jobs(together, loader, sampler):
    prompts = _Prompts(together, 5, loader=loader, **sampler)
    seeds = (1, 2, 3, 4, 5)
    prompts.put(*seeds)
    entries = prompts.wait()
    assert prompts.samplings() == 3  # of two prompts, of two, and of the last alone
    prompts.expect(*seeds)
    assert relative_difference(prompts.latent(1), prompts.latent(2)) > 1000 * EXACT
    ended = [
        next(d["timestamp"] for k, d in e["status"]["messages"] if k == "execution_success") for e in entries
    ]
    assert ended == sorted(ended)
    reports = [prompts.report(seed) for seed in seeds]
    assert [TOGETHER in report for report in reports] == [True, True, True, True, False]
    assert [TAKEN in report for report in reports] == [False, True, False, True, False]
    assert "one image per GPU, for 2 prompts" in reports[0] and ALONE not in "".join(reports)


def test_devices_beside_an_image_share_its_tokens(together):
    prompts = _Prompts(together, 2, devices="cpu:4")
    prompts.put(1, 2)
    prompts.wait()
    prompts.expect(1, 2)
    assert prompts.samplings() == 1 and "data 2 × Ulysses 2: one image per 2 GPUs" in prompts.report(1)


def test_it_is_off_until_it_is_wanted(comfy):
    prompts = _Prompts(comfy, 2)
    prompts.put(1, 2)
    prompts.wait()
    assert prompts.samplings() == 2 and TOGETHER not in prompts.report(1) + prompts.report(2)


def test_a_sampler_with_noise_of_its_own_goes_alone_and_says_why(together):
    prompts = _Prompts(together, 2, sampler_name="euler_ancestral")
    prompts.put(1, 2)
    prompts.wait()
    prompts.expect(1, 2)
    assert prompts.samplings() == 2
    assert (
        f"{ALONE}, so this prompt ran alone: the sampler euler_ancestral gives an image of a batch otherwise"
        in prompts.report(1)
    )
    assert ALONE not in prompts.report(2)  # no prompt waited


def test_a_cancel_ends_the_prompt_that_runs_and_no_other(together):
    prompts = _Prompts(together, 3, steps=100)
    with together.amid(prompts.node, together.client.interrupt):
        prompts.put(1, 2, 3)
        with pytest.raises(PromptInterrupted):
            together.client.wait(prompts.ids[0])
        for one in prompts.ids[1:]:
            together.client.wait(one)
    prompts.expect(2, 3)
    assert not together.output(prompts.file(1)).exists()
    assert TOGETHER in prompts.report(2) and TAKEN in prompts.report(3)


def test_an_edited_queue_loses_nothing_and_runs_what_was_put_in(together):
    prompts = _Prompts(together, 4, steps=100)

    def edit() -> None:
        together.client.take_out(prompts.ids[1])
        prompts.put(5)

    with together.amid(prompts.node, edit):
        prompts.put(1, 2, 3, 4)
        for one in (prompts.ids[0], *prompts.ids[2:4]):
            together.client.wait(one)
    together.client.wait(prompts.ids[4])
    prompts.expect(4, 5)
    assert not together.output(prompts.file(2)).exists()
    assert TOGETHER in prompts.report(1) and TAKEN not in prompts.report(3)  # whose neighbour was taken out
    assert TAKEN in prompts.report(4)


def test_a_prompt_that_fails_takes_none_with_it(together):
    prompts = _Prompts(together, 2)
    prompts.put(1)
    graph = prompts.graph(2)
    graph.save([prompts.node, 0], ".")
    prompts.ids.append(together.client.queue(graph.prompt))
    together.client.wait(prompts.ids[0])
    with pytest.raises(PromptFailed):
        together.client.wait(prompts.ids[1])
    prompts.expect(1)
    assert prompts.samplings() == 1


def test_where_nothing_holds_that_is_computed_ahead_that_is_found_out_once(together):
    prompts = _Prompts(together, 4)
    for seed in (1, 2, 3, 4):
        graph = prompts.graph(seed)
        sampler = graph.prompt[prompts.node]["inputs"]
        sampler["latent_image"] = [graph.add("TestNew", latent=sampler["latent_image"]), 0]
        prompts.ids.append(together.client.queue(graph.prompt))
    prompts.wait()
    prompts.expect(1, 2, 3, 4)
    assert prompts.samplings() == 4
    assert TOGETHER in prompts.report(1) and TAKEN not in prompts.report(2)
    assert all(
        f"{ALONE}, so this prompt ran alone: a node before" in prompts.report(seed) for seed in (2, 3, 4)
    )


def test_where_several_cannot_be_computed_at_once_each_runs_alone_and_says_so(together):
    """The ranks run ComfyUI's loop only for models without functions, and ComfyUI's own would draw out a batch."""
    prompts = _Prompts(together, 2, loader="ParallelModel", cfg=2.0)
    for seed in (1, 2):
        graph = prompts.graph(seed)
        loader = graph.prompt[prompts.node]["inputs"]["parallel_model"][0]
        model = graph.prompt[loader]["inputs"]["model"]
        rescaled = [graph.add("RescaleCFG", model=model, multiplier=0.5), 0]
        graph.prompt[loader]["inputs"]["model"] = rescaled
        prompts.ids.append(together.client.queue(graph.prompt))
    prompts.wait()
    for seed in (1, 2):
        stock = Graph()
        model = [stock.add("RescaleCFG", model=stock.model(STOCK, UNET), multiplier=0.5), 0]
        inputs = (stock.text(1), stock.text(2), stock.latent(draw=4))
        latent = stock.ksampler(model, *inputs, seed=seed, **prompts.sampler)
        assert relative_difference(prompts.latent(seed), together.sample(stock.prompt, latent)) < EXACT
    assert ALONE in prompts.report(1) and ALONE not in prompts.report(2)
