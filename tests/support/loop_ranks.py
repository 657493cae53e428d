"""Runs jobs of ComfyUI's sampling loop on a rank of a test, with a stand-in for the other end of rank 0's link."""

from __future__ import annotations

import torch

from host_and_device import DEVICE, active
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.options import DEFAULT_COMPUTE
from parallel_backend.rank.jobs.reader import JobReader
from parallel_backend.rank.outcome import progress
from parallel_backend.rank.outcome.progress import RequestLink
from parallel_backend.rank.work.held_models import HeldModel
from parallel_backend.rank.work.job import Jobs
from parallel_backend.rank.work.step_boundary import StepBoundary
from parallel_backend.requests import Placement
from parallel_backend.wire.payloads import state_tensors, take_state
from parallel_backend.wire.protocol import Cancel, Envelope, Progress, RunJob
from parallel_backend.wire.transport import unpack_tensors
from shipped_jobs import ship


class ParentOfRankZero:
    """The other end of rank 0's link: records what rank 0 sends. `cancel_at`: the number of the `receive` call that it
    answers with Cancel; 0: never."""

    def __init__(self, cancel_at: int = 0) -> None:
        self.states, self.previews, self.steps, self.strategies = [], [], [], []
        self._cancel_at, self._asked = cancel_at, 0

    def receive(self, timeout):
        self._asked += 1
        return (Envelope(0, 0, Cancel()), ()) if self._asked == self._cancel_at else None

    def send(self, envelope: Envelope, descriptors=()) -> None:
        assert isinstance(envelope.message, Progress)
        self.steps.append(envelope.message.step)
        self.strategies.append(envelope.message.strategy)
        for descriptor in descriptors:
            tensors = unpack_tensors(descriptor)
            self.previews.append(tensors["denoised"])
            if (state := take_state(tensors)) is not None:
                self.states.append(state)


class LoopRanks:
    """This rank, with one model per layout of weights. It sends the state after each step."""

    def __init__(self, world, spec, computing=DEFAULT_COMPUTE) -> None:
        progress.STATES_COST = float("inf")
        self.world, self._spec, self._layouts, self._computing = world, spec, Layouts(world), computing
        self._jobs = Jobs(self._layouts, JobReader(world))
        self.models, self._forwards = {}, {}

    def make_forward(self, strategy):
        if strategy.weights not in self.models:
            model = load_under(self._spec, self._layouts, strategy)
            self.models[strategy.weights] = HeldModel(model)
            if (device := active()) is not None:
                device.put(model.patcher.model)  # mapped weights were not copied to the device
                model.patcher.load_device = DEVICE
        placement = Placement(strategy, compute_options=self._computing)
        return make_module_forward(self.models[strategy.weights].model, self._layouts, placement)

    def _forward_under(self, strategy):
        if strategy not in self._forwards:
            self._forwards[strategy] = self.make_forward(strategy)
        return self._forwards[strategy]

    @torch.inference_mode()
    def run(self, strategy, job, *, state=None, parent=None, **message):
        """Runs a job and returns (latent, how it ran, the parent with its records). `message`: other RunJob fields."""
        parent, steps = parent or ParentOfRankZero(), len(job.sigmas) - 1
        boundary = StepBoundary(
            RequestLink(parent, epoch=0, request=0, rank=self.world.rank),
            control=self.world.control,
            device=self.world.device,
            steps=steps,
            previews=True,
        )
        tensors = ship(self._spec, job).tensors(None) | ({} if state is None else state_tensors(state))
        placement = Placement(strategy, compute_options=self._computing)
        asked = RunJob(placement, steps, previews=True, **message)
        self._forward_under(strategy)
        held = self.models[strategy.weights]
        result, run = self._jobs.run(held, asked, tensors, boundary, self._forward_under)
        return result["latent"], run, parent
