"""The requests that one rank serves: hold a model, run a sampling job, make one model call."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.groups import Layouts, World
from ..errors import DeviceError, RequestError
from ..options import check_step_cache
from ..requests import Conditioning, InputShapes, LoadInfo, ModelSpec, Placement, Rows, SleepInfo
from ..strategy import ParallelStrategy
from ..wire.calibration import Calibration
from ..wire.heartbeat import heartbeat
from ..wire.payloads import Tensors, predict_parts, sample_request, take_state
from ..wire.protocol import ApplyPatches, Calibrate, Predict, RankPatch, RankRun, Sample, Setup
from .errors import PeerFailed, is_out_of_memory
from .lora_worker import LoraWorker
from .memory_meter import MemoryMeter
from .step_boundary import StepBoundary
from .vae_worker import VaeWorker

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ..engine.forward import ParallelForward
    from ..engine.pipefusion.forward import PipelineForward
    from ..models.base import TokenModel

OnCompile = Callable[[], None]

_GOOD, _NO_MEMORY, _REFUSED = 0, 1, 2  # outcomes of a load, the worst highest


class RankWorker:
    """The state that a rank keeps between requests: its place in the world, its model, the prompts it was sent."""

    def __init__(self, setup: Setup) -> None:
        """Joins the process group; blocks until all ranks have."""
        self.world = World(
            rank=setup.rank,
            world_size=setup.world_size,
            device=_device(setup.devices[setup.rank]),
            backend=setup.backend,
            store_path=setup.rendezvous,
        )
        self.vae = VaeWorker(self.world, lambda error: self._agree(error) == _GOOD)
        self.patches = LoraWorker(lambda error: self._agree(error) == _GOOD)
        self._layouts = Layouts(self.world)
        self.meter = MemoryMeter(self.world.device, lambda: self._layouts.traffic.bytes_sent)
        self._model: TokenModel | None = None
        self._inputs: InputShapes | None = None  # of the model that was read last
        self._moved_out: list[torch.nn.Module] = []  # chunks of the model that sleep in host memory
        self._forwards: dict[Placement, ParallelForward | PipelineForward] = {}
        self._prompts: dict[int, Conditioning] = {}

    def load(self, spec: ModelSpec, strategy: ParallelStrategy) -> LoadInfo:
        """Holds `spec` on every rank or on none, split as `strategy` has it; on failure the model held before stays,
        memory permitting.

        All ranks agree on the outcome before anyone gives up the old model: 0 good, 1 out of memory, 2 refused.
        """
        begun = time.perf_counter()
        model, error = self._try_load(spec, strategy)
        worst = self._agree(error)
        if worst == _NO_MEMORY and self._model is not None:
            model = error = None
            self._drop_model()  # the old one was in the way
            model, error = self._try_load(spec, strategy)
            worst = self._agree(error)
        if worst != _GOOD or model is None:
            model = None
            _collect(self.world.device)
            raise error or PeerFailed("another rank could not load the model")
        self._drop_model()
        self._model = model
        self.meter.record_weights(model.chunks)
        return LoadInfo(
            seconds=time.perf_counter() - begun,
            bytes=model.bytes,
            cached=False,
            dtype=model.stored_dtype,
            compute_dtype=str(model.compute_dtype).removeprefix("torch."),
            inputs=self._inputs,
        )

    def apply_patches(self, message: ApplyPatches, tensors: Tensors) -> RankPatch:
        """Changes the model's weights on every rank or on none."""
        if self._model is None:
            raise RequestError("the ranks hold no model; load one first.")
        try:
            return self.patches.apply(self._model.weights, message, tensors)
        finally:
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()  # whole tensors in float32 leave holes that activations do not fill

    def sample(
        self, message: Sample, tensors: Tensors, on_step: StepBoundary, on_compile: OnCompile
    ) -> tuple[Tensors, RankRun]:
        """Runs the whole job; the latent is the same on every rank. `on_compile` is called before parts of the model
        are compiled."""
        from ..engine.first_block_cache import CachedForward
        from ..sampling.denoise import Keep, denoise

        begun = time.perf_counter()
        state = take_state(tensors)
        if state is not None:
            heartbeat.steps_done(state.step)
        request = sample_request(message, tensors)
        forward = self._forward(message.placement, on_compile)
        sent = forward.bytes_sent
        cached: CachedForward | None = None
        keep: Keep = on_step.keep
        if request.cache_threshold > 0:
            check_step_cache(request.cache_threshold, message.placement.strategy)
            from ..engine.forward import ParallelForward

            assert isinstance(forward, ParallelForward), "only PipeFusion has another, and was refused"
            cached = CachedForward(forward, request.cache_threshold, state)
            keep = cached.kept_by(on_step.keep)
        latent = denoise(cached or forward, request, on_step, state=state, keep=keep)
        result = {
            "latent": latent.float(),
            "step_seconds": torch.tensor(on_step.seconds, dtype=torch.float64),
        }
        run = _run(forward, message.placement, begun, sent)
        if cached is not None:
            exact = run.exact and not cached.reused
            run = replace(run, exact=exact, model_calls=cached.calls, reused_calls=cached.reused)
        return result, run if state is None else replace(run, exact=run.exact and state.exact)

    @torch.inference_mode()
    def predict(self, message: Predict, tensors: Tensors, on_compile: OnCompile) -> tuple[Tensors, RankRun]:
        """One model call; the velocity is the same on every rank."""
        begun = time.perf_counter()
        x, sigma, conditioning, extras = predict_parts(tensors)
        device = self.world.device
        for key in message.forget:
            self._prompts.pop(key, None)
        if conditioning is not None:
            self._prompts[message.conditioning] = _on_device(conditioning, device)
        if message.conditioning not in self._prompts:
            raise RequestError(f"no prompt was sent under the key {message.conditioning}.")
        prompt = self._prompts[message.conditioning]
        forward = self._forward(message.placement, on_compile)
        sent = forward.bytes_sent
        (velocity,) = forward([Rows(x.to(device), sigma.to(device), prompt, extras)])
        return {"velocity": velocity.float().cpu()}, _run(forward, message.placement, begun, sent)

    def calibrate(self, message: Calibrate) -> Calibration:
        """Measures the links over the groups of a strategy; needs no model."""
        from .calibrate import calibrate

        return calibrate(self.world, self._layouts.get(message.strategy), message)

    def sleep(self, level: int) -> SleepInfo:
        """Gives device memory back: at level 1 weights go to host memory, at level 2 they are discarded.

        The VAE is discarded at both: ComfyUI's process has it in host memory already.
        """
        begun, device = time.perf_counter(), self.world.device
        before = _allocated(device)
        self.vae.drop()
        if level == 1:
            self.patches.release_originals()
            # Weights that are offloaded lie in host memory as they are.
            chunks = () if self._model is None else self._model.chunks
            self._moved_out = [c for c in chunks if next(c.parameters()).device.type == device.type]
            self._move(torch.device("cpu"))
        else:
            self._drop_model()
        self._record_weights()
        return SleepInfo(time.perf_counter() - begun, before - _allocated(device))

    def wake(self) -> SleepInfo:
        """Takes the weights back from host memory, bit for bit."""
        begun, before = time.perf_counter(), _allocated(self.world.device)
        self._move(self.world.device)
        self._moved_out = []
        self._record_weights()
        return SleepInfo(time.perf_counter() - begun, before - _allocated(self.world.device))

    def _record_weights(self) -> None:
        self.meter.record_weights(() if self._model is None else self._model.chunks)

    def _move(self, device: torch.device) -> None:
        """Moves what sleeps at level 1, on every rank; where one has no room, all drop the model."""
        error = None
        try:
            for chunk in self._moved_out:
                chunk.to(device)
        except Exception as failure:
            error = failure
        if self._agree(error) != _GOOD:
            self._drop_model()
            raise error or PeerFailed("another rank could not move its weights")
        _collect(self.world.device)

    def _forward(self, placement: Placement, on_compile: OnCompile) -> ParallelForward | PipelineForward:
        if self._model is None:
            raise RequestError("the ranks hold no model; load one first.")
        if placement not in self._forwards:
            self._forwards[placement] = self._make_forward(self._model, placement)
        forward = self._forwards[placement]
        if forward.compiles:
            from ..engine.compile import compiler

            compiler().on_begin = on_compile
            compiler().take()  # what a request did that failed or was cancelled
        return forward

    def _make_forward(self, model: TokenModel, placement: Placement) -> ParallelForward | PipelineForward:
        """Collective. A kernel that one rank lacks is refused by all: nobody is left waiting for that rank."""
        from ..engine.attention.kernels import kernel_for
        from ..engine.factory import make_forward

        error = None
        try:
            kernel_for(self.world.device, model.compute_dtype, placement.compute_options.attention)
        except Exception as failure:
            error = failure
        if self._agree(error) != _GOOD:
            raise error or PeerFailed("another rank lacks the attention kernel")
        return make_forward(model, self._layouts, placement)

    def _try_load(
        self, spec: ModelSpec, strategy: ParallelStrategy
    ) -> tuple[TokenModel | None, Exception | None]:
        """(model, None) or (None, error); a rank that fails must still take part in the agreement."""
        try:
            heartbeat.point("load")
            heartbeat.loading(0.0)
            model = self._read_model(spec, strategy)
            self._inputs = self._read_inputs(spec)
            heartbeat.loading(1.0)
            return model, None
        except Exception as error:
            return None, error

    def _read_inputs(self, spec: ModelSpec) -> InputShapes:
        from ..models.registry import inspect_model

        return inspect_model(spec.path, spec.family).inputs

    def _read_model(self, spec: ModelSpec, strategy: ParallelStrategy) -> TokenModel:
        from ..engine.load import load_under

        return load_under(spec, self._layouts, strategy)

    def _agree(self, error: Exception | None) -> int:
        mine = _GOOD if error is None else _NO_MEMORY if is_out_of_memory(error) else _REFUSED
        flag = torch.tensor([mine], dtype=torch.int32)
        if self.world.control is not None:
            with heartbeat.inside("the agreement on a load", range(self.world.world_size)):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.world.control)
        return int(flag.item())

    def _drop_model(self) -> None:
        self._model = None
        self._moved_out = []
        self._forwards.clear()
        self._prompts.clear()
        self.patches.clear()
        _collect(self.world.device)


def _run(
    forward: ParallelForward | PipelineForward, placement: Placement, begun: float, sent_before: int
) -> RankRun:
    compiled, notes = None, [*forward.notes]
    wish = placement.compute_options.attention
    if wish not in ("auto", forward.kernel):
        reason = (
            "engine xfuser does not have it"
            if forward.engine == "xfuser"
            else "a ring merges by log-sum-exp, which torch's own kernels return, and only those take masks"
        )
        notes.append(f"attention {wish} fell back to {forward.kernel}: {reason}")
    if forward.compiles:
        from ..engine.compile import compiler

        compiled = compiler().take()
        notes += compiler().notes_on(compiled)
    return RankRun(
        engine=forward.engine,
        strategy=placement.strategy,
        seconds=time.perf_counter() - begun,
        bytes_sent=forward.bytes_sent - sent_before,
        notes=tuple(notes),
        exact=forward.exact,
        kernel=forward.kernel,
        compiled=compiled,
    )


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(
            device, copy=True
        )  # on the CPU too: the payload is a mapping of memory that the parent made

    guidance = None if prompt.guidance is None else moved(prompt.guidance)
    return Conditioning(moved(prompt.context), moved(prompt.pooled), guidance)


def _device(name: str) -> torch.device:
    """cpu:0, cpu:1, … name ranks; to torch there is one CPU. Raises DeviceError for a device that has gone."""
    device = torch.device("cpu" if name.startswith("cpu") else name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"{name} is not there: a rank sees {torch.cuda.device_count()} GPUs. It may have failed (nvidia-smi, or "
            f"an Xid in the kernel's log), or CUDA_VISIBLE_DEVICES was changed. Take it out of the Strategy Selector's "
            f"devices, or restart ComfyUI.",
            device=name,
        )
    return device


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
