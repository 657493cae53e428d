"""Which waiting prompts may be computed with the one that runs: those that ask its sampler for another seed only."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy_modules import import_comfyui_here
from graphs import Graph
from loop_jobs import loop_job, stock_latent, tiny_model
from pack_nodes import import_node_module

alike_module = import_node_module("nodes.together.alike")
EXACT = 1e-5  # of the largest value


class _Queue:
    """A prompt that runs, and items that wait as ComfyUI's queue has them."""

    def __init__(self) -> None:
        graph = Graph()
        loader = graph.parallel_loader("flux.safetensors", "cpu:2")
        self.text = graph.text(1)
        self.node, _ = graph.parallel_sampler(loader, self.text, graph.text(2), graph.latent(), seed=0)
        self.output = graph.save([self.node, 0], "0.safetensors")
        self.prompt = graph.prompt
        self.waiting: list[tuple] = []

    def put(
        self, name: str, seed: object, *, at: int | None = None, output: str = "", **others: dict
    ) -> None:
        """`others`: inputs of other nodes that are another's; `at`: its number, else after all."""
        prompt = copy.deepcopy(self.prompt)
        prompt[self.node]["inputs"]["seed"] = seed
        for node, inputs in others.items():
            prompt[node]["inputs"].update(inputs)
        number = len(self.waiting) if at is None else at
        self.waiting.append((number, name, prompt, {}, [output or self.output], {}))

    def found(self, *passed: str) -> list[tuple[str, int]]:
        found = alike_module.alike(self.prompt, self.node, self.waiting, passed)
        return [(one.prompt_id, one.seed) for one in found]


@pytest.fixture
def queue() -> _Queue:
    return _Queue()


def test_those_with_another_seed_are_found_in_the_order_of_the_queue(queue):
    queue.put("b", 2, at=5)
    queue.put("c", 3, at=7)
    queue.put("a", 1, at=-1)  # put in front
    assert queue.found() == [("a", 1), ("b", 2), ("c", 3)]


def test_no_more_of_a_long_queue_is_looked_at_than_devices_could_take(queue):
    for seed in range(1, 100):
        queue.put(f"{seed:03}", seed)
    assert queue.found() == [(f"{seed:03}", seed) for seed in range(1, 65)]


def test_what_comes_after_the_sampler_may_be_another_and_what_comes_before_may_not(queue):
    queue.put("other file", 1, **{queue.output: {"path": "1.safetensors"}})
    queue.put("other text", 2, **{queue.text[0]: {"draw": 9}})
    queue.put("like the first", 3)  # to compute it now would overtake the one before it
    assert queue.found() == [("other file", 1)]


@pytest.mark.parametrize("change", [{"steps": 4}, {"cfg": 2.0}, {"sampler_name": "heun"}, {"denoise": 0.5}])
def test_another_value_of_the_sampler_is_another_job(queue, change):
    queue.put("a", 1, **{queue.node: change})
    assert queue.found() == []


def test_a_seed_that_was_there_is_left_to_comfyui_s_cache_and_one_that_is_passed_to_its_turn(queue):
    queue.put("again", 0)
    queue.put("a", 1)
    queue.put("a again", 1)
    queue.put("b", 2)
    assert queue.found() == [("a", 1), ("b", 2)]
    assert queue.found("a") == [("b", 2)]


def test_a_seed_of_another_node_or_an_output_that_needs_no_sampler_ends_the_search(queue):
    queue.put("linked", [queue.text[0], 1])
    queue.put("a", 1)
    assert queue.found() == []
    queue.waiting.clear()
    queue.put("text only", 1, output=queue.text[0])
    assert queue.found() == []
    queue.prompt[queue.node]["inputs"]["seed"] = [queue.text[0], 1]
    queue.waiting.clear()
    queue.put("a", 1)
    assert queue.found() == []


def test_a_sampler_that_mixes_rows_or_draws_noise_and_a_step_cache_go_alone():
    assert alike_module.why_alone({"sampler_name": "euler", "step_cache": "off"}) == ""
    assert "euler_ancestral" in alike_module.why_alone({"sampler_name": "euler_ancestral"})
    assert "cache" in alike_module.why_alone({"sampler_name": "euler", "step_cache": "first_block"})


def test_a_prompt_with_rows_of_its_own_or_anything_unknown_goes_alone():
    one, two = torch.zeros(1, 7, 64), torch.zeros(2, 7, 64)
    plain = {
        "pooled_output": torch.zeros(1, 32),
        "guidance": 3.5,
        "reference_latents": [torch.zeros(1, 16, 4, 4)],
    }
    why = alike_module.why_not_rows
    assert why([[one, plain]]) == why([]) == ""
    assert "batch" in why([[two, plain]]) and "batch" in why([[one, {"pooled_output": torch.zeros(2, 32)}]])
    assert "control" in why([[one, {"control": object()}]])
    assert "unclip_conditioning" in why([[one, {"unclip_conditioning": [{}]}]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    import_comfyui_here()
    return tiny_model(tmp_path_factory.mktemp("alike")).path


def _rows_differ(path: str, sampler: str, *, mask: bool) -> float:
    """By how much, relatively, the second row of a batch is another than it is alone."""
    both = loop_job(sampler, batch=2, mask=mask)
    rows = {"noise": both.noise[1:], "latent": both.latent[1:]}
    rows |= {"denoise_mask": both.denoise_mask[1:]} if mask else {}
    alone = stock_latent(path, loop_job(sampler, batch=2, mask=mask, **rows))
    row = stock_latent(path, both)[1:]
    return ((row - alone).abs().max() / alone.abs().max()).item()


def test_each_sampler_that_may_compute_several_prompts_gives_each_what_it_gives_alone(tiny):
    from comfy.samplers import KSampler

    assert set(KSampler.SAMPLERS) > alike_module.ROW_BY_ROW
    for sampler in sorted(alike_module.ROW_BY_ROW):
        assert _rows_differ(tiny, sampler, mask=False) < EXACT, sampler
    assert _rows_differ(tiny, "euler", mask=True) < EXACT


@pytest.mark.parametrize(
    ("sampler", "mask"), [("euler_ancestral", False), ("dpmpp_2m_sde", False), ("ddim", True)]
)
def test_the_others_do_not(tiny, sampler, mask):
    assert sampler not in alike_module.ROW_BY_ROW
    assert _rows_differ(tiny, sampler, mask=mask) > 100 * EXACT
