"""The self-test of a class distinguishes a right entry of the table from a wrong one, and an outcome from a crash."""

import functools
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from comfy_modules import import_comfyui_here
from parallel_backend.errors import RankFailed
from parallel_backend.models.comfyui.tiny.cases import CASES, build_tiny, tiny_builder, tiny_inputs
from parallel_backend.models.tokens.regions import Region
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.rank.checks.module_parity import EXACT, prove
from parallel_backend.requests import BLOCK, ROWS, STAY

NAME = "ErnieImageModel"


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    import_comfyui_here()
    torch.set_num_threads(1)


def region(**changes):
    """Returns Ernie's region, with `changes` to its blocks."""
    (known,) = TABLE[NAME].regions
    (path,) = known.lists
    return Region({path: replace(known.lists[path], **changes)}, known.leave, known.leaves)


def use(monkeypatch, *regions):
    monkeypatch.setitem(TABLE, NAME, replace(TABLE[NAME], regions=regions))


def use_module(monkeypatch, build):
    monkeypatch.setitem(CASES, NAME, {"one": (build, tiny_inputs("ernie"))})


def test_a_right_entry_holds():
    found = prove(NAME)
    assert (found.class_name, found.mode, found.error) == (NAME, STAY, "") and found.worst <= EXACT


def test_ranks_that_attend_to_their_own_tokens_only_are_found(monkeypatch):
    use(monkeypatch, region(attends=(None,)))
    found = prove(NAME)
    assert found.mode == ROWS and found.worst > 100 * EXACT


def test_code_between_blocks_that_looks_at_tokens_leaves_blocks_that_gather(monkeypatch):
    """Some versions of ComfyUI can only compute one row of this call."""

    def reference_at_zero(*size):
        args, kwargs = tiny_inputs("flux2")(*size)
        return args, kwargs | {"ref_latents_method": "index_timestep_zero"}

    known = TABLE["Flux"]
    stays_with = known.stays_with | {"ref_latents_method"}
    monkeypatch.setitem(TABLE, "Flux", replace(known, stays_with=stays_with))
    monkeypatch.setitem(CASES, "Flux", {"reference at t = 0": (tiny_builder("flux2"), reference_at_zero)})
    found = prove("Flux")
    assert found.mode == BLOCK and found.worst > 100 * EXACT


def test_what_blocks_hand_on_beside_their_tokens_is_found(monkeypatch):
    """Tokens could stay split here, but a block on another device would not get what earlier blocks hand on."""
    ran = []

    def build():
        module = build_tiny("ernie")

        class Counting(type(module.layers[0])):
            @functools.wraps(type(module.layers[0]).forward)
            def forward(self, *args, **kwargs):
                ran[:] = [] if self is module.layers[0] else ran
                ran.append(1)
                return super().forward(*args, **kwargs) * (1 + 0.1 * len(ran))

        for layer in module.layers:
            layer.__class__ = Counting
        return module

    use_module(monkeypatch, build)
    found = prove(NAME)
    assert found.mode == BLOCK and found.worst > 100 * EXACT


def test_blocks_elsewhere_than_the_entry_has_them_are_an_outcome(monkeypatch):
    use(monkeypatch, Region({"blocks_of_old": next(iter(region().lists.values()))}))
    found = prove(NAME)
    assert found.mode == ROWS and "no list of blocks blocks_of_old" in found.error


def test_a_module_that_takes_other_arguments_is_an_outcome(monkeypatch):
    def build():
        raise TypeError("__init__() got an unexpected keyword argument")

    use_module(monkeypatch, build)
    found = prove(NAME)
    assert found.mode == ROWS and "unexpected keyword" in found.error


def test_an_answer_of_no_numbers_does_not_hold(monkeypatch):
    parent = os.getpid()

    def build():
        module = build_tiny("ernie")
        module.register_forward_hook(
            lambda *call: call[2] if os.getpid() == parent else call[2] * float("nan")
        )
        return module

    use_module(monkeypatch, build)
    assert prove(NAME).mode == ROWS


def test_a_missing_package_is_no_outcome(monkeypatch):
    def build():
        raise ImportError("no module named einops")

    use_module(monkeypatch, build)
    with pytest.raises(ImportError):
        prove(NAME)


def test_a_rank_that_is_killed_is_no_outcome_though_its_peer_raises(monkeypatch):
    parent = os.getpid()

    def kill_one(*_):
        if os.getpid() != parent and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def build():
        module = build_tiny("ernie")
        module.register_forward_pre_hook(kill_one)
        return module

    use_module(monkeypatch, build)
    with pytest.raises(RankFailed, match="died"):
        prove(NAME)
