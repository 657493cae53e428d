"""ComfyUI's own modules on a stand-in for a GPU: the pack mixes in no host tensors and no other dtypes, and never waits
for the device.

The stand-in refuses what a GPU refuses, and counts where the host would wait. Under any split, the pack's lines never
wait, and ComfyUI's lines wait no more often than without the pack. A step cache waits once, for its decision.
"""

from __future__ import annotations

import functools

import pytest
import torch

from comfy_modules import UNETS
from dispatch_counter import DEVICE, Refused, counted, world_of_one_process
from module_devices import Found, Subject
from parallel_backend.engine.attention import queries
from parallel_backend.engine.comm.collectives import all_gather
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.tokens.block_tokens import BlockTokens
from parallel_backend.models.comfyui.tiny import cases
from parallel_backend.models.tokens.table import token_mode
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS, STAY
from parallel_backend.strategy import ParallelStrategy

ULYSSES_2, ULYSSES_3 = (ParallelStrategy(ulysses_degree=ranks) for ranks in (2, 3))
RING_2, CFG_2 = ParallelStrategy(ring_degree=2), ParallelStrategy(cfg_degree=2)
STAGES_2 = ParallelStrategy(pipefusion_degree=2)
CLASSES = [name for name in cases.CASES if name != "UNetModel"]
# Each way in which blocks take tokens: text separate, joined or first, masks, guides, sound, frames, pixels in groups.
SEVERAL = {
    "Flux": "flux1 + reference",
    "WanModel": "wan2.2 t per frame",
    "QwenImageTransformer2DModel": "qwen-image + text mask",
    "LTXVModel": "ltx, guides of strengths",
    "LTXAVModel": "ltx-2, guides of strengths",
    "LensTransformer2DModel": "lens",
    "MiniTrainDIT": "cosmos predict2",
    "SingleStreamDiT": "krea2 + reference, gqa",
}
CACHED = SEVERAL | {"OpenAISignatureMMDITWrapper": "sd3.5 medium", "Kandinsky5": "kandinsky5"}
# Models without a mask: their streams are cut into patches differently; one or two lists of blocks, some with refiners.
STAGED = {
    "Flux": "flux1 + reference",
    "WanModel": "wan2.2 t per frame",
    "NextDiT": "z-image",
    "BooguTransformer2DModel": "boogu, 2 refs",
    "OpenAISignatureMMDITWrapper": "sd3.5 medium",
    "LTXAVModel": "ltx-2, 2 guides",
    "MiniMaxH3Model": "minimax-h3, references",
    "Kandinsky5": "kandinsky5",
}
ASKED_ONCE = 6  # waits per job to learn which patch has which elements


pytestmark = [
    pytest.mark.usefixtures("comfyui_here"),
    # ComfyUI's own norms in float32 cause this warning.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


@functools.cache
def subject(kind: str, name: str, rows: int = 1) -> Subject:
    return Subject(cases.CASES[kind][name], rows)


def mode_of(one: Subject) -> str:
    return token_mode(one.name, one.call("").kwargs)


def check(found: Found, alone: Found | None = None) -> None:
    assert found.own == [] and found.drawn == []
    assert found.answers and all(answer.device == DEVICE for answer in found.answers)
    if alone is not None:
        assert found.syncs <= alone.syncs
        ours, theirs = ([(a.shape, a.dtype) for a in one.answers] for one in (found, alone))
        assert ours == theirs


@pytest.mark.parametrize("kind", CLASSES)
def test_a_call_of_each_family_waits_for_the_device_where_comfyuis_own_does_and_nowhere_else(kind):
    for number, name in enumerate(cases.CASES[kind]):
        one = subject(kind, name)
        mode = mode_of(one)
        if number:
            check(one.on_rank(ULYSSES_2, 1, mode))
            continue
        alone = one.alone()
        check(one.on_rank(ULYSSES_2, 1, mode), alone)
        if mode == STAY:
            check(one.on_rank(ULYSSES_2, 0, BLOCK), alone)


@pytest.mark.parametrize("kind", SEVERAL)
def test_nor_does_it_under_any_other_split(kind, monkeypatch):
    monkeypatch.setattr(queries, "MIN_KEYS", 1)
    one = subject(kind, SEVERAL[kind])
    check(one.on_rank(ULYSSES_3, 1, STAY))
    check(one.on_rank(RING_2, 1, STAY))
    check(one.on_rank(ULYSSES_2, 0, ATTENTION))
    check(subject(kind, SEVERAL[kind], rows=2).on_rank(CFG_2, 1, ROWS))


@pytest.mark.parametrize("name", UNETS)
def test_nor_does_a_unet_in_bands(name, monkeypatch):
    monkeypatch.setattr(queries, "MIN_KEYS", 1)
    one = subject("UNetModel", name, rows=3 if name == "svd" else 1)
    check(one.on_rank(ULYSSES_2, 1, BANDS), one.alone())
    if name == "sdxl + controlnet":
        check(one.on_rank(ULYSSES_3, 1, BANDS))
        check(one.on_rank(ULYSSES_2, 0, ATTENTION))


@pytest.mark.parametrize("kind", CACHED)
def test_a_step_cache_waits_once_in_a_call_for_its_decision(kind):
    one = subject(kind, CACHED[kind])
    computed, reused = one.under_cache(ULYSSES_2, 1, STAY)
    for found in (computed, reused):
        (wait,) = found.own
        assert "blocks/step_cache" in wait and wait.endswith("item")


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("kind", STAGED)
def test_patches_in_stages_wait_for_nothing_once_it_is_known_which_elements_they_have(kind, rank):
    found = subject(kind, STAGED[kind]).in_stages(STAGES_2, rank, STAY)
    check(found["whole"])
    assert found["patch"].own == []
    assert all(answer.device == DEVICE for answer in found["patch"].answers)
    assert bool(found["patch"].answers) == (rank == 1)  # only the last stage has the answer
    assert 0 < len(found["owners"].own) <= ASKED_ONCE


def test_what_is_gathered_arrives_where_it_belongs():
    """If the output is a list of tensors, NCCL gathers through another tensor that is as large as all of them."""
    with world_of_one_process(0, 3) as world, counted() as counter:
        axis = Layouts(world).get(ULYSSES_3).sequence
        all_gather(torch.empty(2, 5, device=DEVICE), (2, 2, 1), axis)
    assert [event for event in counter.events if "gather" in event] == ["c10d._allgather_base_"]


def plant(monkeypatch, planted):
    """Runs `planted` before each gather of the tokens that leave the blocks."""
    gather = BlockTokens.gather

    def with_it(tokens, value, argument):
        planted(tokens, value)
        return gather(tokens, value, argument)

    monkeypatch.setattr(BlockTokens, "gather", with_it)


REFUSED = {
    "a tensor of the host": lambda tokens, value: value + torch.arange(value.shape[-1]),
    "a generator of the host": lambda tokens, value: torch.randn(
        3, device=value.device, generator=torch.Generator()
    ),
    "a collective over the host's": lambda tokens, value: all_gather(torch.ones(2), (2, 2), tokens.axis),
    "another dtype": lambda tokens, value: (
        value.flatten(0, -2) @ torch.ones(value.shape[-1], 1, device=value.device)
    ),
}


@pytest.mark.parametrize("planted", REFUSED)
def test_what_a_gpu_refuses_is_seen(planted, monkeypatch):
    plant(monkeypatch, REFUSED[planted])
    with pytest.raises(Refused):
        subject("WanModel", "wan2.1 t2v").on_rank(ULYSSES_2, 1, STAY)


WAITS = {
    "a number": lambda value: value.sum().item(),
    "a decision": lambda value: bool((value > 0).any()),
    "numbers": lambda value: value.flatten()[:3].tolist(),
    "a tensor of numbers": lambda value: torch.tensor([1, 2], device=value.device),
    "new numbers": lambda value: value.new_tensor([1.0]),
    "a copy to the device": lambda value: torch.ones(3).to(value.device),
    "a copy to the host": lambda value: value.cpu(),
    "a list as index": lambda value: value[[0]],
    "an index of the host": lambda value: value[torch.zeros(1, dtype=torch.long)],
    "a mask as index": lambda value: value[value > 0],
    "places": lambda value: (value > 0).nonzero(),
    "sameness": lambda value: torch.equal(value, value),
}


@pytest.mark.parametrize("planted", WAITS)
def test_a_wait_is_seen(planted, monkeypatch):
    plant(monkeypatch, lambda tokens, value: WAITS[planted](value))
    found = subject("WanModel", "wan2.1 t2v").on_rank(ULYSSES_2, 1, STAY)
    assert len(found.own) == 1
    with pytest.raises(AssertionError):
        check(found)
