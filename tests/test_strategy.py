"""ParallelStrategy: degrees, their product, and every rule with its nearest valid setting."""

from dataclasses import replace

import pytest

from parallel_backend.errors import StrategyError
from parallel_backend.strategy import ModelShape, ParallelStrategy

FLUX = ModelShape(heads=24, blocks=57, name="flux1-dev")


def test_world_size_is_the_product_of_all_degrees():
    strategy = ParallelStrategy(data_degree=2, cfg_degree=2, ring_degree=3, ulysses_degree=4)
    assert strategy.world_size == 48
    assert strategy.row_degree == 4
    assert strategy.sequence_degree == 12


def test_description_names_only_the_axes_in_use():
    assert ParallelStrategy().describe() == "one device"
    assert ParallelStrategy(cfg_degree=2, ulysses_degree=2).describe() == "CFG 2 × Ulysses 2"
    assert ParallelStrategy(ulysses_degree=2, head_groups=4).describe() == "Ulysses 2 in 4 groups of heads"
    assert ParallelStrategy(ulysses_degree=2, sends_tokens=True).describe() == "Ulysses 2, tokens sent"


def test_tokens_are_sent_by_two_devices_with_whole_layers_of_a_model_that_is_described():
    tokens = ParallelStrategy(ulysses_degree=2, sends_tokens=True)
    described = replace(FLUX, sends_tokens=True)
    assert not tokens.violations(described, 2)
    others = (tokens.replace(ulysses_degree=4), tokens.replace(tensor_degree=2))
    for strategy, model in ((tokens, FLUX), *((other, described) for other in others)):
        assert any("sends_tokens" in str(one) for one in strategy.violations(model, 4))
    assert tokens.replace(head_groups=2).plain_exchange == ParallelStrategy(ulysses_degree=2)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_degree_that_is_not_a_positive_whole_number_is_refused(value):
    with pytest.raises(StrategyError, match="ring_degree"):
        ParallelStrategy(ring_degree=value)


def test_more_devices_than_heads_name_the_nearest_ulysses_and_ring():
    (line,) = ParallelStrategy(ulysses_degree=32).violations(FLUX, device_count=32)
    assert "24 attention heads" in line and "ulysses_degree 16, ring_degree 2" in line


def test_every_violated_rule_is_listed():
    strategy = ParallelStrategy(cfg_degree=3, pipefusion_degree=60, ulysses_degree=25)
    with pytest.raises(StrategyError) as raised:
        strategy.check(FLUX, device_count=4)
    text = str(raised.value)
    assert text.count("\n- ") == 4
    for word in ("needs 4500 devices", "cfg_degree 3", "has 57 blocks", "ulysses_degree 25"):
        assert word in text


@pytest.mark.parametrize(
    ("strategy", "devices", "nearest"),
    [
        ({"ulysses_degree": 5}, 2, {"ulysses_degree": 2}),
        ({"ulysses_degree": 25}, 25, {"ulysses_degree": 5, "ring_degree": 5}),
        ({"ulysses_degree": 32}, 32, {"ulysses_degree": 16, "ring_degree": 2}),
        ({"cfg_degree": 3}, 3, {"cfg_degree": 2}),
        ({"ring_degree": 3}, 2, {"ring_degree": 2}),
        ({"pipefusion_degree": 60}, 60, {"pipefusion_degree": 57}),
        ({"pipefusion_degree": 2, "shard_weights": True}, 2, {"shard_weights": False}),
        (
            {"cfg_degree": 3, "pipefusion_degree": 60, "ulysses_degree": 5},
            4,
            {"cfg_degree": 1, "pipefusion_degree": 1, "ulysses_degree": 4},
        ),
    ],
)
def test_the_nearest_valid_setting_is_one_for_all_rules_and_runs_on_the_devices(strategy, devices, nearest):
    wrong = ParallelStrategy(**strategy)
    problems = wrong.problems(FLUX, devices)
    assert [dict(problem.nearest) for problem in problems] == [nearest] * len(problems) != []
    assert wrong.replace(**nearest).problems(FLUX, devices) == []
    for problem in problems:
        for name, value in nearest.items():
            assert "nearest valid setting is" not in problem.message or f"{name} {value}" in problem.message


def test_tensor_and_ulysses_together_must_divide_the_heads():
    (line,) = ParallelStrategy(ulysses_degree=4, tensor_degree=4).violations(FLUX, 16)
    assert "24 attention heads" in line and "ring_degree 2, ulysses_degree 2" in line
    (line,) = ParallelStrategy(tensor_degree=5).violations(FLUX, 5)
    assert "tensor_degree 4" in line
    assert ParallelStrategy(ulysses_degree=4, tensor_degree=3).violations(FLUX, 12) == []


def test_one_share_is_needed_for_each_device():
    (line,) = ParallelStrategy(ring_degree=3, device_shares=(2, 1)).violations(FLUX, 3)
    assert "2 shares" in line and "3 devices" in line


@pytest.mark.parametrize("shares", [(1, 0), (1, -2), (1, float("inf")), (float("nan"), 1)])
def test_a_share_that_is_no_positive_number_is_refused(shares):
    with pytest.raises(StrategyError, match="device_shares"):
        ParallelStrategy(ring_degree=2, device_shares=shares)


def test_equal_shares_are_no_shares():
    assert ParallelStrategy(ring_degree=2, device_shares=(3, 3)) == ParallelStrategy(ring_degree=2)


def test_strategies_share_loaded_weights_where_ranks_hold_the_same():
    whole = ParallelStrategy()
    assert ParallelStrategy(cfg_degree=2, ulysses_degree=2, device_shares=(2, 1, 2, 1)).weights == whole
    stages = ParallelStrategy(pipefusion_degree=2)
    assert stages.replace(num_pipeline_patch=8, warmup_steps=3).weights == stages.weights != whole
    assert stages.replace(device_shares=(2, 1)).weights != stages.weights
    assert ParallelStrategy(ulysses_degree=2, shard_weights=True).weights != whole


def test_sharded_and_sliced_weights_do_not_depend_on_how_the_work_is_shared_out():
    for change in (
        {"shard_weights": True},
        {"tensor_degree": 2},
        {"tensor_degree": 2, "shard_weights": True},
    ):
        one = ParallelStrategy(ulysses_degree=2, ring_degree=2, **change)
        assert one.weights == ParallelStrategy(cfg_degree=2, data_degree=2, **change).weights
        assert one.weights.world_size == one.world_size
    offloaded = ParallelStrategy(ulysses_degree=2, offload_weights=True).weights
    assert offloaded.shards and offloaded.shard_weights
    assert offloaded != ParallelStrategy(ulysses_degree=2, shard_weights=True).weights


def test_one_device_has_nobody_to_shard_with():
    assert ParallelStrategy(shard_weights=True).weights == ParallelStrategy()
    alone = ParallelStrategy(tensor_degree=2, shard_weights=True)
    assert alone.weights == ParallelStrategy(tensor_degree=2).weights
    assert ParallelStrategy(offload_weights=True).weights.offload_weights


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"tensor_degree": 2}, "tensor_degree 1, or pipefusion_degree 1"),
        ({"shard_weights": True}, "shard_weights and offload_weights off, or pipefusion_degree 1"),
        ({"offload_weights": True}, "shard_weights and offload_weights off, or pipefusion_degree 1"),
    ],
)
def test_stages_of_a_pipeline_are_held_whole(change, remedy):
    (line,) = ParallelStrategy(pipefusion_degree=2, **change).violations(FLUX, 4)
    assert remedy in line
    assert ParallelStrategy(**change).violations(FLUX, 4) == []


def test_an_unknown_engine_is_named():
    (line,) = ParallelStrategy().violations(FLUX, 1, engine="magic")
    assert "magic" in line and "native" in line


def test_a_strategy_that_keeps_all_rules_has_no_violations():
    assert ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2).violations(FLUX, 8) == []


ANY = ModelShape(4, 30, "wan.safetensors", splits_layers=False, pipelines=False)


@pytest.mark.parametrize(
    ("shape", "strategy", "words", "inputs"),
    [
        (ANY, {"ulysses_degree": 5}, "5 is more than the 4 attention heads", {"ulysses_degree"}),
        (ANY, {"pipefusion_degree": 2}, "valid setting is pipefusion_degree 1", {"pipefusion_degree"}),
        (ANY, {"tensor_degree": 2}, "setting is tensor_degree 1, with shard_weights", {"tensor_degree"}),
        (
            ModelShape(8, 0, "sdxl.safetensors", splits_tokens=False, splits_layers=False, pipelines=False),
            {"ulysses_degree": 3, "ring_degree": 2},
            "ring_degree 2 with ulysses_degree 3: the tokens of one image of sdxl.safetensors cannot be shared out",
            {"ring_degree", "ulysses_degree"},
        ),
    ],
)
def test_what_a_model_does_not_have_is_named_once_with_what_it_has(shape, strategy, words, inputs):
    (problem,) = ParallelStrategy(**strategy).problems(shape, device_count=8)
    assert words in problem.message and set(problem.inputs) == inputs


@pytest.mark.parametrize("strategy", [{"ulysses_degree": 3}, {"ring_degree": 7}, {"cfg_degree": 2}])
def test_heads_need_not_divide_where_ranks_may_take_different_numbers(strategy):
    assert ParallelStrategy(**strategy).violations(ANY, 8) == []


def test_the_sequence_is_split_as_far_as_the_heads_go():
    assert ANY.split_sequence(3) == (3, 1)
    assert ANY.split_sequence(6) == (3, 2)
    assert FLUX.split_sequence(32) == (16, 2)
    assert ModelShape(8, 2, splits_tokens=False).split_sequence(4) == (1, 1)
