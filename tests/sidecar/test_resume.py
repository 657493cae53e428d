"""A sampler's state outside the ranks: what is kept, and that the rest of a job gives the same bits from any step."""

import os
from dataclasses import replace

import pytest
import torch

from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import RankFailed, RequestError, TransportError
from parallel_backend.requests import LoopState, ModelSpec, Placement, RunInfo, SamplerState
from parallel_backend.sampling.denoise import denoise
from parallel_backend.sidecar.resume import ResumableJob, ShippedRequest
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.payloads import state_tensors, take_loop_state, take_state
from parallel_backend.wire.protocol import Progress
from parallel_backend.wire.transport import pack_tensors, unpack_tensors
from plain_jobs import PlainSubject
from point_forward import Boundary, PointForward, point_prompt, point_request
from ranks import run_ranks
from scripted import scripted_request
from tiny_flux import write_tiny_flux

SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m")
STEPS = 10


def over_the_link(state):
    """The state as another group of ranks gets it."""
    descriptor = pack_tensors(state_tensors(state))
    try:
        return take_state(unpack_tensors(descriptor))
    finally:
        os.close(descriptor)


def run_and_keep(forward, request, on_step=lambda i, d: None, **more):
    states = []
    latent = denoise(forward, request, on_step, keep=lambda make: states.append(make()), **more)
    return latent, states


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_job_resumed_at_any_step_gives_the_same_bits(sampler):
    mask = torch.ones(2, 1, 3, 5)
    mask[..., :2] = 0
    request = point_request(
        sampler=sampler,
        sigmas=torch.linspace(1, 0, STEPS + 1),
        negative=point_prompt(1.0),
        cfg=3.0,
        denoise_mask=mask,
        seed=7,
    )
    whole, states = run_and_keep(PointForward(), request)
    assert [state.step for state in states] == list(range(1, STEPS))
    for state in states:
        rest, later = run_and_keep(PointForward(), request, state=over_the_link(state))
        assert torch.equal(rest, whole), state.step
        assert [other.step for other in later] == list(range(state.step + 1, STEPS))


def test_a_resumed_job_runs_the_steps_that_are_left():
    request = point_request(sigmas=torch.linspace(1, 0, STEPS + 1))
    _, states = run_and_keep(PointForward(), request)
    forward, told = PointForward(), []
    denoise(forward, request, lambda i, d: told.append(i), state=states[6])
    assert (told, len(forward.calls)) == ([7, 8, 9], 3)


def test_a_state_of_another_request_is_refused():
    request = point_request(sigmas=torch.linspace(1, 0, STEPS + 1))
    _, states = run_and_keep(PointForward(), request)
    for wrong in (replace(states[0], x=torch.zeros(1, 4, 3, 5)), replace(states[0], step=10)):
        with pytest.raises(RequestError, match="does not fit this request"):
            denoise(PointForward(), request, lambda i, d: None, state=wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"state.step": torch.tensor(1.0)},
        {"state.step": torch.tensor([1])},
        {"state.exact": torch.tensor(1)},
        {"state.generator": torch.zeros(5)},
        {"state.x": torch.zeros(1, 4, 3, 5, dtype=torch.float16)},
        {"state.denoised": torch.zeros(1, 4, 3, 6)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_state_that_is_none_is_refused(change):
    state = SamplerState(1, torch.zeros(1, 4, 3, 5), None, torch.zeros(5, dtype=torch.uint8))
    assert take_state(state_tensors(state)).step == 1
    with pytest.raises(TransportError, match="state"):
        take_state(state_tensors(state) | change)


def pipelines(world, path, cases):
    """The states of each case's whole run, and what the rest gives from some of them."""
    layouts, strategy = Layouts(world), ParallelStrategy(pipefusion_degree=2, warmup_steps=2)
    model = load_under(ModelSpec(path), layouts, strategy)
    found = {}
    for name, request in cases.items():
        for warmup in (2, STEPS):
            forward = PlainSubject(model, layouts, Placement(strategy.replace(warmup_steps=warmup)))
            whole, states = run_and_keep(forward, request, Boundary())
            # A rank without a sampler has none while patches flow; there, the client hands the state to all ranks.
            sent = [torch.zeros_like(whole) for _ in range(STEPS - 1)]
            kept = {state.step: state for state in states}
            for step, x in enumerate(sent, start=1):
                if world.rank == 0:
                    x.copy_(kept[step].x)
                torch.distributed.broadcast(x, 0)
            if warmup == STEPS:
                rest = denoise(forward, request, Boundary(), state=kept[6])
            else:
                generator = torch.Generator().manual_seed(0).get_state()
                state = SamplerState(6, sent[5], None, generator, exact=False)
                rest = denoise(forward, request, Boundary(), state=state)
            found[f"{name} {warmup}"] = {
                "whole": whole,
                "rest": rest,
                "kept": [torch.tensor(kept[step].step) for step in sorted(kept)],
                "last": sent[-1],
            }
    return found


def test_pipefusion_keeps_whole_latents_and_warms_up_again(tmp_path):
    path = write_tiny_flux(tmp_path / "tiny.safetensors", double_blocks=2, single_blocks=2)
    generator = torch.Generator().manual_seed(0)
    base = scripted_request(steps=STEPS)
    prompt = replace(
        base.positive,
        context=torch.randn(1, 7, 64, generator=generator),
        pooled=torch.randn(1, 32, generator=generator),
    )
    noise = torch.randn(1, 16, 10, 11, generator=generator)
    cases = {
        "euler": replace(base, noise=noise, latent=torch.zeros_like(noise), positive=prompt),
    }
    cases["dpmpp_2m"] = replace(cases["euler"], sampler="dpmpp_2m")
    first, _ = run_ranks(pipelines, 2, str(path), cases, backend=NCCL_STREAMS)
    for name in cases:
        exact, flowing = first[f"{name} {STEPS}"], first[f"{name} 2"]
        assert [int(step) for step in exact["kept"]] == list(range(1, STEPS))
        assert torch.equal(exact["rest"], exact["whole"])
        assert [int(step) for step in flowing["kept"]] == list(range(1, STEPS))
        # What was kept before the last step is as far from the end as one step moves it.
        assert (flowing["last"] - flowing["whole"]).abs().max() < (noise - flowing["whole"]).abs().max()
        difference = (flowing["rest"] - flowing["whole"]).abs().max()
        assert 0 < difference < 0.2 * flowing["whole"].abs().max()


# The client's side.


def info(**changes):
    return RunInfo(engine="native", strategy=ParallelStrategy(), step_seconds=(0.5, 0.5), **changes)


def test_the_job_goes_on_from_the_last_state_and_the_result_tells_of_all_steps():
    job, told = ResumableJob(scripted_request(), lambda *step: told.append(step)), []
    assert "state.x" not in job.begin()
    state = SamplerState(2, torch.ones(1, 4, 6, 6), None, torch.zeros(5, dtype=torch.uint8))
    job.take(Progress(1, 4, 0.1), {"denoised": torch.zeros(1)})
    job.take(Progress(2, 4, 0.2), state_tensors(state))
    job.take(Progress(3, 4, 0.3), None)
    text = job.survive(RankFailed(1, "killed by SIGKILL\nwith output"), "cuda:1")
    assert (
        text
        == "process 1 on cuda:1 failed (killed by SIGKILL); the job goes on after step 2 on processes started anew"
    )
    assert torch.equal(job.begin()["state.x"], state.x)
    result = job.merged(info(notes=("a note",)))
    assert result.step_seconds == (0.1, 0.2, 0.5, 0.5)
    assert result.notes == ("a note", text)
    assert [step for step, _, _ in told] == [1, 2, 3] and told[0][2] is not None and told[1][2] is None


def shipped() -> ShippedRequest:
    return ShippedRequest(torch.zeros(1, 16, 9, 6), 4, lambda holdings: {})


def test_more_than_can_be_sent_at_once_is_refused_with_what_helps():
    much = torch.zeros(1, dtype=torch.uint8).expand(9 * 2**30)  # of one byte of memory
    job = ResumableJob(replace(shipped(), tensors=lambda holdings: {"7": much}), None)
    with pytest.raises(
        RequestError, match=r"has 9\.0 GiB beside its model .* at most 8\.0 GiB .* \.safetensors"
    ):
        job.begin()


def answers(step, first, calls):
    """Those of so many model calls, each of which has its number all over."""
    numbers = torch.arange(first, first + calls, dtype=torch.float32)
    return LoopState(step, first, numbers[:, None, None, None, None, None].expand(-1, 1, 2, 16, 9, 6).clone())


def test_a_job_of_comfyuis_loop_goes_on_from_all_that_its_calls_gave():
    job = ResumableJob(shipped(), None)
    assert "state.answers" not in job.begin()
    for state in (answers(1, 0, 1), replace(answers(2, 1, 2), calls=3, reused=1)):
        job.take(Progress(state.step, 4, 0.1), state_tensors(state))
    job.take(Progress(3, 4, 0.1), None)
    assert "goes on after step 2" in job.survive(RankFailed(1, "killed"), "cuda:1")
    state = take_loop_state(dict(job.begin()))
    assert (state.step, state.first, state.calls, state.reused) == (2, 0, 3, 1)
    assert state.answers[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 2]
    job.take(
        Progress(4, 4, 0.1), state_tensors(answers(4, 3, 1))
    )  # the new ranks go on where the record ends
    assert len(job.begin()["state.answers"]) == 4


def test_a_record_ends_where_a_part_of_it_was_lost():
    job = ResumableJob(shipped(), None)
    job.begin()
    for state in (answers(1, 0, 1), answers(3, 2, 1), answers(4, 3, 1)):
        job.take(Progress(state.step, 4, 0.1), state_tensors(state))
    state = take_loop_state(dict(job.begin()))
    assert (state.step, len(state.answers)) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"state.at": torch.zeros(2)},
        {"state.at": torch.zeros(3, dtype=torch.int64)},
        {"state.answers": torch.zeros(1, 1, 2, 16, 9, 6, dtype=torch.float16)},
    ],
    ids=["step", "count", "dtype"],
)
def test_answers_that_are_none_are_refused(change):
    job = ResumableJob(shipped(), None)
    with pytest.raises(TransportError):
        job.take(Progress(1, 4, 0.1), state_tensors(answers(1, 0, 1)) | change)


def test_a_second_approximation_is_said():
    job = ResumableJob(scripted_request(), None)
    job.begin()
    state = SamplerState(2, torch.ones(1, 4, 6, 6), None, torch.zeros(5, dtype=torch.uint8), exact=False)
    job.take(Progress(2, 4, 0.2), state_tensors(state))
    job.survive(RankFailed(0, "crash"), "cpu:0")
    job.begin()
    flowing = replace(info(exact=False), strategy=ParallelStrategy(pipefusion_degree=2))
    reused = info(exact=False, model_calls=9, reused_calls=3)
    for told, again in ((flowing, "PipeFusion warmed up again"), (reused, "the step cache was empty again")):
        assert job.merged(told).notes[-1].startswith(again)
    assert not any("another approximation" in note for note in job.merged(info()).notes)
