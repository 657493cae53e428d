"""A job's model calls leave a record outside the ranks, from which the job goes on after a crash."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.errors import RankFailed, RequestError, TransportError
from parallel_backend.job.payload import pack_step
from parallel_backend.requests import LoopState, RunInfo
from parallel_backend.sidecar.resume import ResumableJob, ShippedRequest
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.payloads import state_tensors, take_state
from parallel_backend.wire.protocol import Progress
from scripted import scripted_request


def info(**changes):
    return RunInfo(engine="native", strategy=ParallelStrategy(), step_seconds=(0.5, 0.5), **changes)


def test_the_job_goes_on_from_all_that_its_calls_gave_and_the_result_tells_of_all_steps():
    told = []
    job = ResumableJob(shipped(), lambda *step: told.append(step))
    assert "state.answers" not in job.begin()
    job.take(Progress(1, 4, 0.1), {"denoised": torch.zeros(1)} | state_tensors(answers(1, 0, 1)))
    job.take(Progress(2, 4, 0.2), state_tensors(answers(2, 1, 2)))
    job.take(Progress(3, 4, 0.3), None)
    text = job.survive(RankFailed(1, "killed by SIGKILL\nwith output"), "cuda:1")
    cause, goes_on = "killed by SIGKILL", "the job goes on after step 2 on processes started anew"
    assert text == f"process 1 on cuda:1 failed ({cause}); {goes_on}"
    state = take_state(dict(job.begin()))
    assert (state.step, state.first) == (2, 0)
    assert state.answers[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 2]
    result = job.merged(info(notes=("a note",)))
    assert result.step_seconds == (0.1, 0.2, 0.5, 0.5)
    assert result.notes == ("a note", text)
    assert [step for step, _, _ in told] == [1, 2, 3] and told[0][2] is not None and told[1][2] is None
    # The new ranks go on where the record ends.
    job.take(Progress(4, 4, 0.1), state_tensors(answers(4, 3, 1)))
    assert len(job.begin()["state.answers"]) == 4


def test_a_nodes_callback_gets_no_step_twice():
    steps: list[int] = []
    request = replace(shipped(), on_latents=lambda tensors: steps.append(int(tensors["step"][0])))
    job = ResumableJob(request, None)

    def take(step: int) -> None:
        job.take(Progress(step, 4, 0.1), pack_step(step - 1, torch.zeros(1), torch.zeros(1), 4))

    for step in (1, 2, 3):
        take(step)
    job.survive(RankFailed(1, "killed by SIGKILL"), "cuda:1")
    for step in (2, 3, 4):
        take(step)
    assert steps == [0, 1, 2, 3]


def shipped() -> ShippedRequest:
    return ShippedRequest(torch.zeros(1, 16, 9, 6), 4, lambda holdings: {})


def test_more_than_can_be_sent_at_once_is_refused_with_what_helps():
    much = torch.zeros(1, dtype=torch.uint8).expand(9 * 2**30)  # takes one byte of memory
    job = ResumableJob(replace(shipped(), tensors=lambda holdings: {"7": much}), None)
    with pytest.raises(
        RequestError, match=r"has 9\.0 GiB beside its model .* at most 8\.0 GiB .* \.safetensors"
    ):
        job.begin()


def answers(step, first, calls):
    """Returns the state after `step` with the answers of `calls` model calls, each filled with the call's number."""
    numbers = torch.arange(first, first + calls, dtype=torch.float32)
    return LoopState(step, first, numbers[:, None, None, None, None, None].expand(-1, 1, 2, 16, 9, 6).clone())


def test_a_record_ends_where_a_part_of_it_was_lost():
    job = ResumableJob(shipped(), None)
    job.begin()
    for state in (answers(1, 0, 1), answers(3, 2, 1), answers(4, 3, 1)):
        job.take(Progress(state.step, 4, 0.1), state_tensors(state))
    state = take_state(dict(job.begin()))
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
    job = ResumableJob(shipped(), None)
    job.begin()
    job.take(Progress(2, 4, 0.2), state_tensors(answers(2, 0, 2)))
    job.survive(RankFailed(0, "crash"), "cpu:0")
    job.begin()
    flowing = replace(info(exact=False), strategy=ParallelStrategy(pipefusion_degree=2))
    reused = info(exact=False, model_calls=9, reused_calls=3)
    for told, again in ((flowing, "PipeFusion warmed up again"), (reused, "the step cache was empty again")):
        assert job.merged(told).notes[-1].startswith(again)
    assert not any("another approximation" in note for note in job.merged(info()).notes)


def test_a_plain_job_begins_again():
    job = ResumableJob(ShippedRequest.of(scripted_request()), None)
    before = job.begin()
    job.take(Progress(2, 4, 0.2), {"denoised": torch.zeros(1)})
    assert "the job begins again on processes started anew" in job.survive(RankFailed(0, "crash"), "cpu:0")
    assert job.begin() == before and job.merged(info()).step_seconds == (0.5, 0.5)
