"""Jobs with exchange_dtype fp8 come close to stock's latent and are recorded as approximate, or as exact if they split
no tokens."""

from differences import relative_difference
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.options import ROUNDED, ComputeOptions
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import NO_TRIALS, TrialCandidate, TrialPlan
from ranks import run_ranks
from shipped_jobs import stock_latent

IN_FP8 = ComputeOptions(exchange_dtype=ROUNDED)
ULYSSES = ParallelStrategy(ulysses_degree=2)


def _run(world, spec, job, strategies, trials=NO_TRIALS):
    """Returns for each strategy (latent, True if recorded as exact, notes, number of strategies that were tried)."""
    ranks, found = LoopRanks(world, spec, IN_FP8), []
    for strategy in strategies:
        latent, run, _ = ranks.run(strategy, job, trials=trials)
        found.append((latent, run.exact, list(run.notes), len(run.trials)))
    return found


def test_the_latent_is_near_stocks_and_called_approximate_unless_no_tokens_are_shared_out(tmp_path):
    spec, job = tiny_model(tmp_path), loop_job()
    expected = stock_latent(spec, job)
    strategies = (ULYSSES, ParallelStrategy(ring_degree=2), ParallelStrategy(cfg_degree=2))
    for *split, (whole, is_exact, (note,), _) in run_ranks(_run, 2, spec, job, strategies):
        assert relative_difference(whole, expected) <= 1e-5 and is_exact
        assert note.startswith("exchange_dtype fp8 had nothing to do: no tokens")
        for latent, is_exact, notes, _ in split:
            assert 1e-5 < relative_difference(latent, expected) < 0.05
            assert not is_exact and any("rounded to 8 bits (exchange_dtype fp8)" in note for note in notes)


def test_a_job_of_which_some_steps_were_rounded_is_approximate_whatever_it_ends_with(tmp_path):
    """The job tries one device in between, and continues with the faster of the two strategies."""
    spec, job = tiny_model(tmp_path), loop_job(steps=30)
    trials = TrialPlan((TrialCandidate(ParallelStrategy()),), budget=30.0)
    (first,), (second,) = run_ranks(_run, 2, spec, job, [ULYSSES], trials)
    assert not first[1] and not second[1] and first[3] == 2
