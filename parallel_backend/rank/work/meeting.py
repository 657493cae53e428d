"""Shares out the calls of a job's network: all ranks run the job, and meet in each call."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map

from ...engine.attention.kernels import OVERRIDE
from ...engine.blocks.block_calls import AttentionBypassed
from ...engine.blocks.step_cache import ModuleCache
from ...engine.comm.collectives import broadcast
from ...engine.comm.groups import Layouts
from ...engine.module_forward import ModuleForward
from ...engine.shared_layers import flatten, send_tree
from ...errors import RequestError
from ...models.comfyui.calls import OPTIONS, find_constants, has_joint_rows, row_count
from ...requests import ATTENTION, ROWS, HeadTrial, InputShapes, ModuleCall
from ...wire.payloads import check_module_inputs
from ..outcome.agreement import agree_on_call, worst_outcome
from ..outcome.errors import REFUSALS, is_fault, refusing
from .answers import Answers
from .call_mode import SHARE, Foreign, NetworkState, foreign_in, mode_of
from .device import all_threads

if TYPE_CHECKING:
    from ..pipefusion.patch_flow import PatchFlow

_BYPASSED = (
    "a node has a block attend in a way of its own, so devices share out attention where it is ComfyUI's, and compute "
    "all else alike"
)
_JOINED = (
    "a node's code may look at several prompts at once, so one device computes the prompts that cfg_degree would "
    "share out"
)
_DIFFERENTIATED = (
    "the sampler differentiates the model (torch.func), so each device computes these calls whole"
)
_DIFFERENTIATED_SHARED = (
    "The sampler differentiates the model (torch.func), which the devices cannot do with weights that they share out; "
    "set shard_weights to off, and tensor_degree and pipefusion_degree to 1."
)
_CALLED = (
    "A node has replaced `__call__` of the class {kind}, by which devices share out its calls; take it out."
)
_IN_STAGES = "Nodes have changed the model, which PipeFusion cannot share out; set pipefusion_degree to 1."


def lead_calls(kind: type) -> None:
    """Makes calls of networks of this class go to the meeting of the current job. Raises RequestError for a class with
    a `__call__` of a pack."""
    if getattr(kind.__call__, SHARE, False):
        return
    if kind.__call__ is not nn.Module.__call__:
        raise RequestError(_CALLED.format(kind=kind.__name__))

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        share = self.__dict__.get(SHARE)
        return nn.Module.__call__(self, *args, **kwargs) if share is None else share(self, args, kwargs)

    setattr(__call__, SHARE, True)
    kind.__call__ = __call__  # type: ignore[method-assign]


@dataclass(eq=False)
class ModuleMeeting:
    """Shares out the network calls of one job, on one rank. `current`: returns the forward for the next call;
    `leave_out`: is given the seconds in which it tried foreign code, which say nothing about the strategy; `fits`:
    returns False for a latent whose prompts ComfyUI would compute one after the other, for want of memory; `mode`: the
    token mode that the class is proven for; `inputs`: the widths that its calls take; `code`: what packs have
    replaced in the code of networks; `cache`: the job's step cache, if any; `same_on_all`: True while all ranks compute
    the same, False in a call of which each rank computes its share."""

    _layouts: Layouts
    _state: NetworkState
    _current: Callable[[], ModuleForward]
    _leave_out: Callable[[float], None]
    _fits: Callable[[list[Tensor]], bool]
    _answers: Answers
    _mode: str
    _inputs: InputShapes
    _code: Foreign
    _cache: ModuleCache | None
    flow: PatchFlow | None = None
    guider: Any = None  # of a sampler run
    calls: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    same_on_all: bool = True
    _is_inside: bool = False
    _prompts: dict[Any, int] = field(default_factory=dict)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _sigma: float = 0.0

    @contextmanager
    def holding(self, network: nn.Module) -> Iterator[None]:
        """Within this context, calls of `network` go to this meeting."""
        lead_calls(type(network))
        network.__dict__[SHARE] = self._call
        try:
            yield
        finally:
            network.__dict__.pop(SHARE, None)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context, this rank calls the network by itself."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def end_round(self) -> None:
        """Resets the counts of calls by prompt, before the sampler calls the model again."""
        self._asked.clear()

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside:
            return nn.Module.__call__(module, *args, **kwargs)
        self.calls += 1
        with self.alone():
            if self.flow is not None and self.flow.flows:
                return self.flow.compute(self._numbered(self._described(module, args, kwargs)[0]))
            if any(map(is_functorch_wrapped_tensor, _parts_of(args[0]))):
                return self._differentiated(module, args, kwargs)
            known = self._answers.recorded(self.calls, _parts_of(args[0])[0])
            if known is not None:
                return known
            self._take_first_ranks(args)
            with refusing(type(module).__name__, self._layouts.traffic):
                return self._share(*self._described(module, args, kwargs))

    def _differentiated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a call that a sampler differentiates on each rank alone: exchanges have no derivative."""
        forward = self._current()
        strategy = forward.layout.strategy
        if (
            forward.stages is not None
            or forward.model.byte_sharding is not None
            or strategy.tensor_degree > 1
        ):
            raise RequestError(_DIFFERENTIATED_SHARED)
        self._answers.stop()
        self.notes[_DIFFERENTIATED] = None
        return nn.Module.__call__(module, *args, **kwargs)

    def _share(self, call: ModuleCall, foreign: Foreign) -> Any:
        forward = self._current()
        if forward.stages is not None and foreign.takes_part:
            raise RequestError(_IN_STAGES)
        if self.flow is not None:
            answer = self.flow.compute(self._numbered(call))
            self._answers.add(answer, is_all=True)
            return answer
        cache = self._cache_for(call, foreign)
        try:
            if self._splits_prompts(call, foreign) and not self._are_apart(call, foreign):
                call = replace(call, inseparable=True)
                if forward.layout.row.size > 1:
                    self.notes[_JOINED] = None
            answer = self._compute_by_heads(
                self._numbered(call) if cache is not None else call, foreign, cache
            )
        except AttentionBypassed:
            self._answers.stop()
            self._mode = ATTENTION
            self.notes[_BYPASSED] = None
            return self._compute(replace(call, tokens=ATTENTION, inseparable=True), None)
        self._answers.add(answer, is_all=not foreign.takes_part)
        return answer

    @property
    def _is_shared(self) -> bool:
        """False under a strategy of fewer devices, which `auto` may try: the first rank computes alone."""
        return self._current().layout.strategy.world_size == self._layouts.world.world_size

    def _compute_by_heads(self, call: ModuleCall, foreign: Foreign, cache: ModuleCache | None) -> Any:
        """Computes a call on all ranks. If they share out the heads of another pack's attention, finds out in the first
        call of the same code and size whether it computes head by head; if not, or if it stores something, each rank
        computes all heads."""
        override = (call.kwargs.get(OPTIONS) or {}).get(OVERRIDE)
        is_another_packs = call.by_heads or override is not None
        if not self._is_shared or self._current().layout.sequence.size == 1:
            return self._compute(call, cache)
        if call.tokens != ATTENTION or not is_another_packs:
            return self._compute(call, cache)
        if not foreign.kernel_is_pure:
            return self._compute(replace(call, joint_heads=True), cache)
        key, known = (foreign.code, *_parts_of(call.args[0])[0].shape), self._state.by_head
        if key in known:
            return self._compute(replace(call, joint_heads=not known[key]), cache)
        trial = HeadTrial()
        answer = self._compute(replace(call, head_trial=trial), cache)
        known[key] = not worst_outcome(self._layouts.world, int(trial.differs), "model call")
        self._leave_out(trial.seconds)
        return answer

    def _splits_prompts(self, call: ModuleCall, foreign: Foreign) -> bool:
        """Returns True if ranks would compute several prompts of a call with foreign code apart."""
        layout, count = self._current().layout, _prompt_count(call.kwargs)
        by_rows = layout.row.size > 1 or (layout.sequence.size > 1 and call.tokens in (ROWS, ATTENTION))
        is_split = self._is_shared and by_rows and count > 1 and call.rows % count == 0
        return is_split and foreign.takes_part

    def _are_apart(self, call: ModuleCall, foreign: Foreign) -> bool:
        """Returns True if foreign code gives each prompt of a call the same answer without the others' rows, or would
        not get them on one device either. Tries it once for the same code. Collective."""
        if not foreign.is_pure:
            return False
        count, world = _prompt_count(call.kwargs), self._layouts.world
        key, known = (foreign.code, count), self._state.apart
        if key not in known:
            if worst_outcome(world, int(not self._fits(_parts_of(call.args[0]))), "model call"):
                return True
            started = time.perf_counter()
            failed = not self._try_apart(call, count)
            known[key] = not worst_outcome(world, int(failed), "model call")
            self._leave_out(time.perf_counter() - started)
        return known[key]

    def _try_apart(self, call: ModuleCall, count: int) -> bool:
        """Computes a call with the rows of each of its `count` prompts as NaN in turn, which no other's answer may
        contain; then as it is, with all rows together and apart."""

        def compute(latent: Any, inseparable: bool = True) -> list[Tensor]:
            # UNets take a ControlNet's output out of lists, so each call gets its own.
            kwargs = tree_map(lambda value: value, call.kwargs)
            args = (latent, *call.args[1:])
            one = replace(call, args=args, kwargs=kwargs, inseparable=inseparable)
            return _parts_of(self._compute(one, None))

        latent = call.args[0]
        try:
            for one in range(count):
                if any(_is_spread(part, one, count) for part in compute(_with_nan(latent, one, count))):
                    return False
            return all(map(_are_near, compute(latent), compute(latent, inseparable=False)))
        except (*REFUSALS, ArithmeticError) as error:  # the code makes a number of a NaN, or expects all rows
            if is_fault(error):
                raise
            return False

    def _compute(self, call: ModuleCall, cache: ModuleCache | None) -> Any:
        """Computes a call on all ranks; under a strategy of one device, rank 0 computes and sends its answer to all."""
        forward, world, is_shared = self._current(), self._layouts.world, self._is_shared
        parts: list[Tensor] = []
        form = ""
        self.same_on_all = is_shared and call.inseparable
        try:
            if is_shared:
                return forward(call, cache)
            if world.rank == 0:
                with all_threads(world.device):
                    parts, form = flatten(_parts_of(forward(call, None)))
        finally:
            self.same_on_all = True
        parts = send_tree(parts, form, 0, self._layouts, "the wait for a model call")
        return parts[0] if isinstance(call.args[0], Tensor) else type(call.args[0])(parts)

    def _take_first_ranks(self, args: tuple[Any, ...]) -> None:
        """Checks that all ranks make the same call, and overwrites their latent and sigma with rank 0's. Collective."""
        if self._layouts.world.world_size == 1:
            return
        parts = [*_parts_of(args[0]), *(one for one in args[1:2] if isinstance(one, Tensor))]
        form = sum((place + 1) * size for part in parts for place, size in enumerate(part.shape))
        agree_on_call(self._layouts.world, False, self.calls, form)
        for part in parts:
            first = part.contiguous()
            broadcast(first, 0, self._layouts.everyone)
            if first.data_ptr() != part.data_ptr():
                part.copy_(first)

    def _described(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ModuleCall, Foreign]:
        if len(args) > 2:
            names = list(inspect.signature(type(module).forward).parameters)[3:]
            args, kwargs = args[:2], {**dict(zip(names, args[2:], strict=False)), **kwargs}
        check_module_inputs(args[0], kwargs.get("context"), self._inputs)
        options = kwargs.get(OPTIONS) or {}
        foreign = foreign_in(options, self._state, self._code)
        mode = mode_of(
            foreign, kwargs, type(module).__name__, self._mode, bool(self._current().model.regions)
        )
        rows = row_count(args[0])
        runs = _prompt_count(kwargs)
        # Foreign code may look at all rows of a prompt at once.
        unit = rows // runs if foreign.takes_part and rows % runs == 0 else 1
        constants = find_constants(getattr(self.guider, "conds", None))
        is_described = self._mode not in (ATTENTION, ROWS)
        joint = has_joint_rows([kwargs.get(name) for name in constants], rows, is_described)
        call = ModuleCall(args, kwargs, rows, mode, joint_rows=joint, unit=unit, by_heads=foreign.kernel)
        call = replace(call, careful=foreign.takes_part and is_described)
        within = foreign.kernel or (foreign.takes_part and not foreign.between)
        return replace(call, inseparable=foreign.takes_part and not foreign.is_pure, eager=within), foreign

    def _cache_for(self, call: ModuleCall, foreign: Foreign) -> ModuleCache | None:
        options = call.kwargs.get(OPTIONS) or {}
        sigmas = options.get("sigmas")
        if foreign.takes_part or not options.get("uuids") or options.get("context_window") is not None:
            return None
        if self._cache is not None and sigmas is not None and float(sigmas.max()) != self._sigma:
            self._sigma = float(sigmas.max())
            self.end_round()
        return self._cache

    def _numbered(self, call: ModuleCall) -> ModuleCall:
        """Adds the numbers of its prompts to the call, and how often they were called in this round."""
        uuids = call.kwargs[OPTIONS]["uuids"]
        prompts = tuple(self._prompts.setdefault(one, len(self._prompts)) for one in uuids)
        self._asked[prompts] += 1
        return replace(call, prompts=(*prompts, self._asked[prompts]))


def _prompt_count(kwargs: dict[str, Any]) -> int:
    """Returns the number of prompts whose rows a call has, one after the other."""
    return len((kwargs.get(OPTIONS) or {}).get("cond_or_uncond") or ()) or 1


def _with_nan(latent: Any, prompt: int, count: int) -> Any:
    """Returns a copy of a latent, or of each of its parts, in which the rows of one of `count` prompts are NaN."""
    parts = [part.clone() for part in _parts_of(latent)]
    for part in parts:
        part.unflatten(0, (count, -1))[prompt] = torch.nan
    return parts[0] if isinstance(latent, Tensor) else type(latent)(parts)


def _is_spread(answer: Tensor, prompt: int, count: int) -> bool:
    """Returns True if the answer to another prompt than this one contains a NaN."""
    found = answer.isnan().unflatten(0, (count, -1)).flatten(1).any(1)
    found[prompt] = False
    return bool(found.any())


def _are_near(one: Tensor, other: Tensor) -> bool:
    """Returns True if two answers differ by no more than rounding in another order."""
    if one.shape != other.shape:
        return False
    limit = max(4 * torch.finfo(one.dtype).eps, 1e-4)
    return bool((one - other).float().norm() <= limit * one.float().norm())


def _parts_of(latent: Any) -> list[Tensor]:
    """Returns the parts of a latent (video and sound) as a list, of one part for a tensor."""
    return [latent] if isinstance(latent, Tensor) else list(latent)
