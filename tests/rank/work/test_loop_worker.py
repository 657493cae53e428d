"""ComfyUI's own loop over ranks: what a job resumes from, at any step of any kind of sampler, and what ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks, ParentOfRankZero
from parallel_backend.models.comfyui import loop as comfyui_loop
from parallel_backend.rank.work import loop_worker
from parallel_backend.sidecar.resume import LoopRecord
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import TrialCandidate, TrialPlan, TrialRun
from ranks import run_ranks

ULYSSES, CFG, ONE = ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2), ParallelStrategy()
STEPS = 4
# Keeps nothing; calls back between two calls; several steps; ancestral; trees of noise, of one call a step and two;
# guidance by a closure; steps by values.
KINDS = (
    "euler",
    "heun",
    "dpmpp_2m",
    "uni_pc",
    "euler_ancestral",
    "dpmpp_sde",
    "dpmpp_3m_sde",
    "euler_cfg_pp",
    "dpm_adaptive",
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loop"))


class Ranks(LoopRanks):
    """Under Ulysses, if no trials change that."""

    def make_forward(self, strategy):
        forward = super().make_forward(strategy)
        answer = forward._answer

        def counted(call, *cached):
            self._calls += 1
            return answer(call, *cached)

        forward._answer = counted
        return forward

    def run(self, job, state=None, parent=None, **message):
        """(latent, how it ran, what the parent was told, network calls of this rank)."""
        self._calls = 0
        return *super().run(ULYSSES, job, state=state, parent=parent, **message), self._calls


def resumed_anywhere(world, spec):
    """Of each kind of sampler: the whole run, and the rest from the record after the first step, a middle one and the
    last."""
    ranks, found = Ranks(world, spec), {}
    for number, sampler in enumerate(KINDS):
        job = loop_job(sampler, steps=STEPS, mask=number % 2 == 0)
        whole, _, parent, calls = ranks.run(job)
        rests, told, saved = [], [], []
        record, count = LoopRecord(), torch.tensor([len(parent.states)])
        torch.distributed.broadcast(count, 0)
        for i in range(int(count)):
            if world.rank == 0:
                record.add(parent.states[i])
            if i not in (0, int(count) // 2, int(count) - 1):
                continue
            state = _from_first(world, record.whole() if world.rank == 0 else None)
            rest, _, again, fewer = ranks.run(job, state)
            rests.append(rest)
            told.append([state.step, *again.steps])
            saved.append(calls - fewer)
        found[sampler] = {
            "whole": whole,
            "rests": rests,
            "told": told,
            "saved": saved,
            "steps": parent.steps,
            "previews": len(parent.previews),
        }
    return found


def _from_first(world, state):
    """A record as ComfyUI's process sends it to all ranks."""
    shape = torch.zeros(8, dtype=torch.int64)
    if world.rank == 0:
        shape[: state.answers.ndim + 1] = torch.tensor([state.step, *state.answers.shape])
    torch.distributed.broadcast(shape, 0)
    step, *sizes = (n for n in shape.tolist() if n)
    answers = state.answers.clone() if world.rank == 0 else torch.empty(sizes)
    torch.distributed.broadcast(answers, 0)
    return loop_worker.LoopState(step, 0, answers)


def test_a_job_goes_on_after_any_step_with_the_same_bits_and_without_a_call_made_before(spec):
    first, _ = run_ranks(resumed_anywhere, 2, spec)
    for sampler in KINDS:
        found = first[sampler]
        steps = found["steps"]
        assert steps == list(range(1, len(steps) + 1)) and found["previews"] == len(steps), sampler
        for rest, (step, *told) in zip(found["rests"], found["told"], strict=True):
            assert torch.equal(rest, found["whole"]), (sampler, step)
            assert told == steps[step:], (sampler, step)
        assert found["saved"][0] > 0 and found["saved"] == sorted(set(found["saved"])), sampler


def raised(action, *args, **named):
    """(kind, words) of what it raises."""
    try:
        action(*args, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def ended_early(world, spec):
    """What ranks say of jobs that do not come to their end, each followed by one that does."""
    ranks, found = Ranks(world, spec), {}
    whole, _, _, _ = ranks.run(loop_job("dpmpp_2m"))
    cases = {f"cancel {sampler}": (loop_job(sampler, steps=STEPS), ParentOfRankZero(2)) for sampler in KINDS}
    noise = torch.full_like(loop_job().noise, 3e38)
    cases["no numbers"] = (loop_job("euler", noise=noise), None)
    cases["another sampler"] = (loop_job("no such sampler"), None)
    cases["a seed without successor"] = (loop_job("euler_ancestral", seed=2**64 - 1), None)
    wrong = loop_job()
    wrong.conds["positive"][0]["model_conds"]["c_crossattn"] = ("CONDCrossAttn", torch.randn(1, 7, 5))
    cases["another model's prompt"] = (wrong, None)
    cases["another ComfyUI"] = (loop_job(), None)
    for name, (job, parent) in cases.items():
        hook, comfyui_loop._HOOK = (
            comfyui_loop._HOOK,
            "no hook" if name == "another ComfyUI" else comfyui_loop._HOOK,
        )
        kind, words = raised(ranks.run, job, parent=parent)
        comfyui_loop._HOOK = hook
        after, _, _, _ = ranks.run(loop_job("dpmpp_2m"))
        found[name] = {
            "kind": kind,
            "words": words,
            "steps": [] if parent is None else parent.steps,
            "is usable": torch.equal(after, whole),
        }
    return found


def test_jobs_that_end_early_end_on_all_ranks_which_stay_usable(spec):
    first, other = run_ranks(ended_early, 2, spec)
    assert all(found["is usable"] for found in first.values())
    for sampler in KINDS:
        name = f"cancel {sampler}"
        assert first[name]["kind"] == other[name]["kind"] == "Cancelled"
        assert first[name]["steps"] == [1, 2] and "after step 2" in other[name]["words"]
    for name, words in {
        "no numbers": "NaN or infinite in step 1 of 4",
        "another sampler": "has no sampler 'no such sampler'",
        "another ComfyUI": "makes model calls in a way that the ranks do not know",
        "a seed without successor": "The sampler euler_ancestral cannot compute",
    }.items():
        assert first[name]["kind"] == "RequestError" and words in first[name]["words"]
        assert other[name]["kind"] == "PeerFailed"
    same = "another model's prompt"
    assert first[same]["kind"] == other[same]["kind"] == "RequestError"
    assert "Flux cannot compute with what it was given" in other[same]["words"]


SECONDS = {ULYSSES: 1.0, CFG: 0.9, ONE: 0.8}


def switched(world, spec):
    """Whole runs under Ulysses, and runs that try the other strategies and end under one device."""

    class ScriptedTrials(TrialRun):
        """As if each step had taken what SECONDS says; only rank 0's clock may count."""

        def took(self, seconds):
            super().took(SECONDS[self.strategy] if world.rank == 0 else 100.0 * seconds)

    loop_worker.TrialRun = ScriptedTrials
    ranks, found = Ranks(world, spec), {}
    trials = TrialPlan(tuple(map(TrialCandidate, (CFG, ONE))), budget=99.0)
    for sampler in ("euler", "dpmpp_2m", "euler_ancestral", "dpmpp_sde"):
        job = loop_job(sampler, steps=19)
        whole, _, _, every = ranks.run(job)
        tried, run, _, calls = ranks.run(job, trials=trials)
        found[sampler] = {
            "whole": whole,
            "tried": tried,
            "ran": [run.strategy.describe(), *(trial.strategy.describe() for trial in run.trials)],
            "calls": [every, calls],
        }
    return found


def test_strategies_change_between_steps_and_the_latent_stays(spec):
    first, other = run_ranks(switched, 2, spec)
    for sampler, found in first.items():
        difference = (found["tried"] - found["whole"]).abs().max() / found["whole"].abs().max()
        assert difference <= 1e-5, sampler
        assert found["ran"] == ["one device", "Ulysses 2", "CFG 2", "one device"], sampler
        every, calls = found["calls"]
        assert calls == every, sampler
        # The other rank has nothing to do once one device computes.
        assert 0 < other[sampler]["calls"][1] < other[sampler]["calls"][0] == every, sampler


def recorded(world, spec):
    """The states of a run whose record has room for the answers of two calls, of one prompt each."""
    job = loop_job("euler", cfg=1.0)
    loop_worker.MOST_KEPT = 2 * job.noise.nbytes
    _, _, parent, _ = Ranks(world, spec).run(job)
    return [[state.step, state.first, *state.answers.shape[:2]] for state in parent.states]


def test_a_record_ends_where_it_would_take_too_much_memory(spec):
    states, none = run_ranks(recorded, 2, spec)
    assert states == [[1, 0, 1, 1], [2, 1, 1, 1]] and none == []


def under_a_step_cache(world, spec):
    """Latents, network calls and how many of them were reused: of a whole run, and of one that goes on after a step."""
    ranks, found = Ranks(world, spec), []
    job = loop_job("heun", steps=6, cache_threshold=0.2)
    whole, run, parent, _ = ranks.run(job)
    found.append((whole, run.model_calls, run.reused_calls, run.exact))
    record, count = LoopRecord(), torch.tensor([len(parent.states)])
    torch.distributed.broadcast(count, 0)
    for i in range(int(count) - 1):
        if world.rank == 0:
            record.add(parent.states[i])
    state = _from_first(world, record.whole() if world.rank == 0 else None)
    if world.rank == 0:
        state = replace(state, calls=record.whole().calls, reused=record.whole().reused)
    rest, run, _, _ = ranks.run(job, state)
    found.append((rest, run.model_calls, run.reused_calls, run.exact))
    exact, run, _, _ = ranks.run(replace(job, cache_threshold=0.0))
    found.append((exact, run.model_calls, run.reused_calls, run.exact))
    return found


def test_a_step_cache_in_the_loop_is_counted_and_begins_again_where_a_job_is_resumed(spec):
    whole, rest, exact = run_ranks(under_a_step_cache, 2, spec)[0]
    latent, calls, reused, is_exact = whole
    assert calls == 11 and 0 < reused < 10 and not is_exact
    # After a crash the cache is empty, so fewer calls are reused; those of before still count.
    assert rest[1] == 11 and 0 < rest[2] <= reused and not rest[3]
    assert exact[2:] == (0, True)
    assert 1e-4 < (latent - exact[0]).abs().max() / exact[0].abs().max() < 0.5
