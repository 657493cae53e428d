"""What a model call carries beside its latent, shared out: residuals, references and masks under every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.extras import ResidualShares, mask_in_order
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.load import load_under
from parallel_backend.engine.patches import PatchPlan
from parallel_backend.engine.rows import batched, take
from parallel_backend.engine.token_split import TokenPlan
from parallel_backend.requests import Conditioning, Extras, ModelSpec, Placement, Rows
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tiny_flux import write_tiny_flux

HEIGHT, WIDTH, TEXT = 7, 10, 5  # 4 x 5 image tokens
REFERENCE = (6, 4)  # 3 x 2 tokens
TOKENS = TEXT + 20 + 6


def _rows(count: int) -> list[Rows]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden = torch.rand(count, TOKENS, TOKENS, generator=generator) < 0.3
    hidden[:, :, 0] = False  # every query sees something
    hidden[:, :, TEXT + 10 :] |= (
        torch.arange(TOKENS).reshape(1, -1, 1) < TEXT
    )  # text sees no end of the image
    extras = Extras(
        references=(draw(1, 16, *REFERENCE),),
        places=torch.tensor([[0.0, 0, 0, 0.5, 2], [1.0, 0, 3, 0.5, 2]]),
        mask=draw(count, TOKENS, TOKENS).masked_fill(hidden, float("-inf")),
        residuals={0: draw(count, 20, 256), 2: draw(1, 26, 256)},
    )
    prompt = Conditioning(draw(count, TEXT, 64), draw(count, 32), torch.full((count,), 3.5))
    return [Rows(draw(count, 16, HEIGHT, WIDTH), torch.full((count,), 0.7), prompt, extras)]


@torch.inference_mode()
def _velocity(world, path: str, strategy: ParallelStrategy, rows: int) -> torch.Tensor:
    layouts = Layouts(world)
    forward = make_forward(
        load_under(ModelSpec(path), layouts, strategy), layouts, Placement(strategy, "native")
    )
    return forward(_rows(rows))[0].clone()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(
        write_tiny_flux(tmp_path_factory.mktemp("flux") / "x.safetensors", double_blocks=2, single_blocks=3)
    )


@pytest.fixture(scope="module")
def expected(path) -> torch.Tensor:
    (alone,) = run_ranks(_velocity, 1, path, ParallelStrategy(), 3)
    return alone


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(data_degree=2),
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ring_degree=3),
        ParallelStrategy(ulysses_degree=2, ring_degree=2),
        ParallelStrategy(tensor_degree=2),
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=3),
        ParallelStrategy(pipefusion_degree=2, ring_degree=2),
        ParallelStrategy(ring_degree=2, device_shares=(3, 1)),
    ],
    ids=ParallelStrategy.describe,
)
def test_every_rank_gives_what_one_gives(path, expected, strategy):
    for found in run_ranks(_velocity, strategy.world_size, path, strategy, 3, backend=NCCL_STREAMS):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("changed", ["references", "places", "mask", "residuals"])
def test_each_of_them_matters(path, expected, changed, monkeypatch):
    rows = _rows(3)[0]
    extras = {name: getattr(rows.extras, name) for name in ("references", "places", "mask", "residuals")}
    if changed == "references":
        extras["references"] = (extras["references"][0] + 1,)
    elif changed == "places":
        extras["places"] = extras["places"] * torch.tensor([1, 1, 1, 2, 1])
    else:
        extras[changed] = None if changed == "mask" else {}
    other = [Rows(rows.x, rows.sigma, rows.conditioning, Extras(**extras))]
    monkeypatch.setitem(globals(), "_rows", lambda count: other)
    (found,) = run_ranks(_velocity, 1, path, ParallelStrategy(), 3)
    assert (found - expected).abs().max() > 1e-3 * expected.abs().max()


def test_rows_with_extras_are_taken_line_by_line_and_not_joined():
    (rows,) = _rows(3)
    first, second = take([rows], slice(0, 1)), take([rows], slice(1, 3))
    assert torch.equal(second[0].extras.mask, rows.extras.mask[1:])
    assert len(first[0].extras.references[0]) == 1 and len(second[0].extras.references[0]) == 2
    assert torch.equal(second[0].extras.residuals[0], rows.extras.residuals[0][1:])
    assert len(batched(first + second)) == 2


def test_a_mask_follows_the_ranks_order_of_tokens_and_has_no_infinities():
    plan = TokenPlan.split(2, 4, 2)
    assert plan.order == [0, 2, 3, 1, 4, 5]
    mask = torch.arange(36.0).reshape(1, 6, 6)
    ordered = mask_in_order(mask, plan.order, torch.float32, torch.device("cpu"))
    assert ordered.shape == (1, 1, 6, 6) and ordered[0, 0, 1, 3] == mask[0, 2, 1]
    boolean = mask_in_order(mask > 7, plan.order, torch.float16, torch.device("cpu"))
    assert torch.isfinite(boolean).all() and boolean[0, 0, 5, 5] == 0 and boolean[0, 0, 0, 0] < -60000
    minus = mask_in_order(
        torch.full((1, 6, 6), float("-inf")), plan.order, torch.bfloat16, torch.device("cpu")
    )
    assert torch.isfinite(minus).all()


def test_patches_have_an_order_of_their_own():
    plan = PatchPlan.split(2, 6, patches=2, degree=2, ulysses=1)
    assert sorted(plan.whole_order) == list(range(8))
    assert [token - 2 for token in plan.whole_order if token >= 2] == plan.image_tokens(
        0
    ) + plan.image_tokens(1)


def test_residuals_end_where_references_begin_and_blocks_share_what_is_moved():
    residual = torch.arange(1.0, 4.0).reshape(1, 3, 1)
    to = (torch.device("cpu"), torch.bfloat16)
    shares = ResidualShares({0: residual, 1: residual, 3: residual + 1}, slice(2, 5), 6, *to)
    assert shares(0).flatten().tolist() == [3, 0, 0] and shares(0).dtype == torch.bfloat16
    assert shares(1) is shares(0) and 2 not in shares and shares(3).flatten().tolist() == [4, 0, 0]
    picked = ResidualShares({0: residual}, torch.tensor([5, 0]), 6, *to)(0)
    assert picked.flatten().tolist() == [0, 1]


@torch.inference_mode()
def _order_of_arrival(world, path: str) -> list[str]:
    """Of a call's blocks and of the residuals after them, each as it begins."""
    layouts, strategy, events = Layouts(world), ParallelStrategy(), []
    model = load_under(ModelSpec(path), layouts, strategy)
    for number, block in enumerate(model.blocks[0]):
        block.register_forward_pre_hook(lambda *inputs, number=number: events.append(f"block {number}"))
    share = ResidualShares._share
    ResidualShares._share = lambda self, residual: (events.append("residual"), share(self, residual))[1]
    (rows,) = _rows(1)
    extras = replace(rows.extras, residuals={block: torch.ones(1, 26, 256) for block in range(4)})
    make_forward(model, layouts, Placement(strategy))([replace(rows, extras=extras)])
    return events


def test_a_residual_arrives_while_the_block_before_it_computes(path):
    (events,) = run_ranks(_order_of_arrival, 1, path)
    # The first of each kind (0 and 1 are double blocks) at once; what is added after block 1, before that begins.
    doubles = ["block 0", "residual", "block 1"]
    assert events == ["residual", "residual", *doubles, "block 2", "residual", "block 3", "block 4"]
