"""Weights sharded as bytes: ranks that hold a share of every block compute what a rank with all weights computes."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_weight_files import CPU, answer, inputs, spec, write
from differences import numbers_held, relative_difference
from parallel_backend.engine import load as engine_load
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Axis, Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import AbsentWeight, ByteSharding
from parallel_backend.errors import RequestError
from parallel_backend.models.base import ModelPart
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.placing import blocks_of, moved
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.models.staging import component_tensors
from parallel_backend.requests import ModuleCall, Placement
from parallel_backend.strategy import ModelShape, ParallelStrategy
from ranks import run_ranks

TOLERANCE = 1e-5
FORMS = ["fp32", "bf16", "float8_e4m3fn", "int8 convrot"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {form: str(write(folder / f"{number}.safetensors", form)) for number, form in enumerate(FORMS)}


def sharding_over(world):
    layouts = Layouts(world)
    layout = layouts.get(ParallelStrategy(data_degree=world.world_size, shard_weights=True))
    return ByteSharding(layout.shard, CPU, offload=False), layouts.traffic


def stored_bytes(module):
    return sum(piece.nbytes for p in module.parameters() for piece in component_tensors(p)[0])


def sharded_answers(world, paths):
    """Returns for each file: ([answers to two calls, to one after a sleep, to one after a share was lost and stored
    again, to one before that], bytes of this rank's shares, numbers that the parameters hold between calls, bytes sent
    by a call, share of the parameters that this rank has a part of)."""
    results = {}
    for form, path in paths.items():
        sharding, traffic = sharding_over(world)
        model = load(spec(path), CPU, ModelPart(byte_sharding=sharding))
        first = answer(model)
        sent = traffic.bytes_sent
        again = answer(model)
        sent = traffic.bytes_sent - sent
        held = sum(share.nbytes for share in sharding.shares)
        left = sum(map(numbers_held, model.module.parameters()))
        for chunk in model.chunks:
            chunk.to(CPU)  # as ranks move it to sleep and to wake
        woken = answer(model)
        if world.rank == 1:
            for share in sharding.shares:
                share.data.zero_()
        lost = answer(model)
        names = [name.removeprefix("diffusion_model.") for name in model.originals]
        kept = [name for name in names if sharding.keeps(name)]
        for name in kept:
            original = model.originals[f"diffusion_model.{name}"]
            sharding.put(name, moved(original, CPU, model.module.get_parameter(name).dtype, None))
        answers = [first, again, woken, answer(model), lost]
        results[form] = answers, held, left, sent, len(kept) / len(names)
    return results


@pytest.mark.parametrize(("ranks", "forms"), [(2, FORMS), (3, FORMS[::3])])
def test_sharded_weights_give_what_whole_ones_give(files, ranks, forms):
    files = {form: files[form] for form in forms}
    results = run_ranks(sharded_answers, ranks, files)
    for form, path in files.items():
        whole = load(spec(path), CPU)
        total, parts = stored_bytes(whole.module), 1 + len(list(blocks_of(whole.module)))
        plain = answer(whole)
        for result in results:
            (*answers, lost), held, left, sent, kept = result[form]
            errors = [relative_difference(found, plain) for found in answers]
            assert max(errors) <= TOLERANCE, (form, errors)
            assert not relative_difference(lost, plain) < 1e-2, "every rank needs every rank's share"
            assert left == 0, "between calls nothing is whole"
            assert total / ranks <= held <= 1.1 * total / ranks + parts * 1024
            assert sent == (ranks - 1) * held, "each part travels once in a call"
            assert kept < 0.9, "a rank need not store what others keep"


def job_under(world, path, strategy):
    """Returns (answers to a call, to its repetition from a step cache, to another; bytes of each; reused calls)."""
    layouts, cache = Layouts(world), ModuleCache(0.01)
    sharding = None
    if strategy.shards:
        sharding = ByteSharding(layouts.get(strategy).shard, CPU, offload=False)
    model = load(spec(path), CPU, ModelPart(byte_sharding=sharding))
    forward = make_module_forward(model, layouts, Placement(strategy))
    (latent, times), kwargs = inputs(rows=2)
    found, sent = [], [0]
    with torch.inference_mode():
        for x in (latent, latent, -latent):
            found.append(forward(ModuleCall((x, times), dict(kwargs), rows=2), cache))
            sent.append(forward.bytes_sent)
    return found, [after - before for before, after in pairwise(sent)], cache.reused


@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"cfg_degree": 2}, {"data_degree": 3}])
def test_blocks_that_a_step_cache_leaves_out_are_not_gathered(files, degrees):
    """Only the block that is already on its way is gathered. One of three ranks has none of the two rows."""
    expected, _, reused = run_ranks(job_under, 1, files["fp32"], ParallelStrategy())[0]
    assert reused == 1 and relative_difference(expected[1], expected[2]) > 1e-2
    strategy = ParallelStrategy(**degrees, shard_weights=True)
    ranks = run_ranks(job_under, strategy.world_size, files["fp32"], strategy)
    for found, (all_blocks, some, again), reused in ranks:
        assert reused == 1
        assert max(map(relative_difference, found, expected)) <= TOLERANCE
        assert some < 0.8 * all_blocks and abs(again - all_blocks) < 0.1 * all_blocks


def load_all(world, path, dtype):
    model = load_under(
        spec(path, weight_dtype=dtype), Layouts(world), ParallelStrategy(cfg_degree=2, shard_weights=True)
    )
    held = sum(numbers_held(p) * p.element_size() for chunk in model.chunks for p in chunk.parameters())
    return held, list(map(numbers_held, model.module.parameters())), answer(model)


@pytest.mark.parametrize("dtype", ["auto", "float8_e4m3fn"])
def test_loading_under_a_strategy_leaves_a_rank_its_share(files, monkeypatch, dtype):
    shape = ModelShape(heads=2, blocks=4)
    monkeypatch.setattr(engine_load, "inspect_model", lambda path, family: SimpleNamespace(shape=shape))
    whole = load(spec(files["bf16"], weight_dtype=dtype), CPU)
    for held, left, output in run_ranks(load_all, 2, files["bf16"], dtype):
        assert set(left) == {0}
        assert held < 0.55 * stored_bytes(whole.module)
        assert relative_difference(output, answer(whole)) <= TOLERANCE


class Steps(nn.Module):
    """Blocks that run in the order of the argument `order`, and one parameter around them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.blocks[3].weight = self.blocks[2].weight  # tied
        self.around = nn.Parameter(torch.ones(3))
        fill(self)

    def forward(self, x, order):
        for number in order:
            x = self.blocks[number](x)
            if number == 1 and x is None:
                raise ValueError
        return x + self.around


ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 2, 1), (3, 0), (0, 1, 2, 3)]


def run_orders(world):
    sharding, traffic = sharding_over(world)
    module, outputs, sent = Steps(), [], []
    sharding.shard(module, list(module.blocks), {})
    for order in ORDERS:
        before = traffic.bytes_sent
        with sharding.call():
            outputs.append(module(torch.eye(3), order))
        sent.append(traffic.bytes_sent - before)
    return outputs, sent


def test_blocks_may_run_in_another_order_than_in_the_call_before():
    whole = Steps()
    wanted = [whole(torch.eye(3), order) for order in ORDERS]
    for outputs, sent in run_ranks(run_orders, 2):
        assert all(output.equal(w) for output, w in zip(outputs, wanted, strict=True))
        share = sent[0] // 5
        # Around and four blocks. Fetched ahead in vain: block 1 in the third call, 0 in the fourth, 3 in the fifth.
        assert [n // share for n in sent] == [5, 5, 6, 4, 6]


class Posed(nn.Module):
    """A block that a model also calls by other methods, one of which calls the block as a module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)

    def forward_pose(self, x):
        return self(x) + self.layer.weight.sum()

    def width(self):
        return self.layer.weight.shape[0]


class Figures(nn.Module):
    """A model that ComfyUI calls by another method before it calls it, which MiniMax-H3 is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Posed() for _ in range(2))
        self.prompt = nn.Linear(3, 3)
        fill(self)

    def preprocess_text_embeds(self, x):
        return self.prompt(x)

    def forward(self, x):
        x = self.preprocess_text_embeds(x)
        for block in self.blocks:
            x = block.forward_pose(block(x)) * block.width()
        return x


def answers_of_figures(module, call):
    """Returns what a module answers in two calls, and in a third with a method that a pack has replaced."""
    outputs = []
    for _ in range(2):
        x = module.preprocess_text_embeds(torch.eye(3))
        with call():
            outputs.append(module(x))
    with pytest.MonkeyPatch.context() as patch, call():
        patch.setattr(Posed, "forward_pose", lambda block, x: block(x) * 2)
        return [*outputs, module(x)]


def run_by_other_methods(world):
    sharding, _ = sharding_over(world)
    module = Figures()
    sharding.shard(module, list(module.blocks), {})
    return answers_of_figures(module, sharding.call), list(map(numbers_held, module.parameters()))


def test_a_module_and_its_blocks_have_their_weights_whichever_of_their_methods_is_called():
    expected = answers_of_figures(Figures(), nullcontext)
    for outputs, held in run_ranks(run_by_other_methods, 2):
        assert all(map(torch.equal, outputs, expected))
        assert set(held) == {0}


def run_into_an_error(world):
    sharding, _ = sharding_over(world)
    module = Steps()
    sharding.shard(module, list(module.blocks), {})
    # The second call fails at block 7, which does not exist, while block 1 is fetched ahead.
    for order in ((0, 1), (0, 7)):
        with suppress(IndexError), sharding.call():
            module(torch.eye(3), order)
    left = list(map(numbers_held, module.parameters()))
    with sharding.call():
        return left, module(torch.eye(3), (0, 1))


class Halves(nn.Module):
    """A block of two layers that has no forward, like Prism's blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class Reading(nn.Module):
    """A model that calls the halves of its blocks. `reads`: True uses the first's weight directly, as Kandinsky 6."""

    def __init__(self, reads):
        super().__init__()
        self.blocks = nn.ModuleList(Halves() for _ in range(3))
        self._reads = reads

    def forward(self, x):
        for block in self.blocks:
            first = block.first
            x = nn.functional.linear(x, first.weight, first.bias) if self._reads else first(x)
            x = x + block.second(x)
        return x


def answers_of_halves(world):
    """Returns the whole and the sharded module's answers (an error message if it reads), and a weight's attributes."""
    found = []
    for reads in (False, True):
        torch.manual_seed(5)
        module, x = Reading(reads), torch.randn(2, 8)
        with torch.inference_mode():
            found.append(module(x))
            sharding, _ = sharding_over(world)
            sharding.shard(module, list(module.blocks), {})
            try:
                with sharding.call():
                    found.append(module(x))
            except RequestError as error:
                found.append(str(error))
    weight = module.blocks[0].first.weight
    found.append([tuple(weight.shape), str(weight.dtype), str(weight.device), weight.numel(), weight.dim()])
    return found


def test_blocks_that_are_never_called_gather_by_their_parts_and_a_weight_that_is_only_read_is_refused():
    for whole, shared, _, refused, known in run_ranks(answers_of_halves, 2):
        assert torch.equal(shared, whole)
        assert "read outside of its block's turn" in refused and "shard_weights off" in refused
        assert known == [(8, 8), "torch.float32", "cpu", 64, 2]


def test_a_weight_that_is_not_there_moves_with_its_module_in_no_memory_and_is_absent_in_any_dtype():
    """Ranks that sleep and wake move their modules to host memory and back."""
    module = Halves()
    module.first.weight = torch.empty(()).expand(8, 8).as_subclass(AbsentWeight)
    for device in ("cpu", "meta"):
        module.to(device)
        found = module.first.weight
        assert (found.device.type, found.shape, found.stride()) == (device, (8, 8), (0, 0))
    for other in (module.first.weight, module.first.weight.to(torch.bfloat16), module.first.weight.detach()):
        with pytest.raises(RequestError, match="outside of its block's turn"):
            other + 1


def test_a_call_that_fails_leaves_nothing_whole_and_the_next_one_runs():
    for left, output in run_ranks(run_into_an_error, 2):
        assert set(left) == {0}
        assert output.equal(Steps()(torch.eye(3), (0, 1)))


def test_the_next_block_travels_while_one_computes(monkeypatch):
    sharding = ByteSharding(Axis((0,), 0, None), CPU, offload=False)
    module, events = Steps(), []
    sharding.shard(module, list(module.blocks), {})
    # A module lists its direct parameters before those of its blocks.
    names = dict(zip(map(id, sharding.shares), ("around", 0, 1, 2, 3), strict=True))
    start = sharding._start
    monkeypatch.setattr(
        sharding, "_start", lambda part: (events.append(names[id(part.share)]), start(part))[1]
    )
    for number, block in enumerate(module.blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(f"{number} done"))
    for _ in range(2):
        events.clear()
        with sharding.call():
            module(torch.eye(3), (0, 1, 2))
    assert events == ["around", 0, 1, "0 done", 2, "1 done", "2 done"]
