"""Compares a model class of ComfyUI on two forked ranks with one process, to prove its token mode in the table.

The modules are tiny, with random weights that make every input matter. The calls are of each kind that the table knows.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engine.comm.groups import Layouts, World
from ...engine.module_forward import make_module_forward
from ...engine.stages.owners import pack
from ...engine.stages.stale_keys import StaleKeyCache
from ...engine.tokens.block_tokens import ImagePatch
from ...errors import RankFailed
from ...models.comfyui.environment import import_comfyui
from ...models.comfyui.tiny.cases import CASES, Inputs, TinyModel
from ...models.comfyui.tiny.weights import fill
from ...models.tokens.table import TABLE, has_stages, sends_tokens, token_mode
from ...requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, ComfyUISource, ModuleCall, Placement
from ...sampling.image_patches import ElementPatches
from ...strategy import ParallelStrategy
from ...wire.checks.findings import SelfTest
from ...wire.parent_death import die_with_parent
from ..outcome.errors import is_out_of_memory

EXACT = 1e-5  # of the largest value; float32 on the CPU differs by 1e-6, a token in the wrong place by 1e-2
ROWS_OF_A_CALL = 2
ROWS_IN_BANDS = 3  # not divisible by two ranks, so each image is split into bands
SIZE = (9, 7)  # latent height and width: their tokens are not divisible by two ranks
_STRATEGY = ParallelStrategy(ulysses_degree=2)
_TOKENS = _STRATEGY.replace(sends_tokens=True)
_STAGES, _PATCHES = ParallelStrategy(pipefusion_degree=2), 3
_NO_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_WORDS = 500  # characters of an error
_PATIENCE = 60.0  # s for the ranks of a class; they usually take 1 s
_NOTICE = 5.0  # s in which the death of a rank must show after its peer has raised

Compute = Callable[[World], float]


@dataclass(frozen=True)
class _Case:
    """A module, one call of it, and the answer that one process computes."""

    model: TinyModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    answer: list[Tensor]

    @property
    def modes(self) -> tuple[str, ...]:
        known = token_mode(type(self.model.module).__name__, self.kwargs)
        return (BANDS,) if known == BANDS else tuple(dict.fromkeys((BLOCK, known)))


def prove_all(comfyui: ComfyUISource, names: Sequence[str]) -> tuple[SelfTest, ...]:
    """Tests classes of a ComfyUI on the CPU, in a process that does nothing else. It never touches a GPU: the order and
    the number of tokens are the same on all devices."""
    os.environ |= dict.fromkeys(_NO_GPU, "")
    torch.set_num_threads(1)  # ranks are forked, and a thread pool does not survive a fork
    # Without ComfyUI's own command-line flags: they choose dtypes and kernels, not what is a token.
    import_comfyui(comfyui, torch.device("cpu"))
    return tuple(map(prove, names))


@torch.inference_mode()
def prove(name: str) -> SelfTest:
    """Tests the class `name` and returns the token mode that it passes. An error of the class's own code is an outcome,
    so it is not raised. Forks, so this process must have no compute threads."""
    try:
        cases = list(_cases(name))
    except Exception as error:
        if _is_no_outcome(error):
            raise
        return SelfTest(name, ROWS, 0.0, _in_words(error))  # it takes arguments that the pack does not know

    worst, mode = 0.0, STAY
    # Each mode runs by itself: a failure with tokens that stay apart says nothing about blocks that gather.
    modes = ((BANDS, ATTENTION),) if TABLE[name].bands else ((BLOCK, ROWS), (STAY, BLOCK))
    for mode, otherwise in modes:
        found = _on_ranks(functools.partial(_worst, cases, mode))
        if isinstance(found, str):
            return SelfTest(name, otherwise, 0.0, found)
        if found > EXACT:
            return SelfTest(name, otherwise, found)
        worst = max(worst, found)
    return SelfTest(name, mode, worst)


def _worst(cases: Sequence[_Case], mode: str, world: World) -> float:
    """Returns the largest difference of this rank's answers over the calls that `mode` applies to."""
    layouts = Layouts(world)
    worst = 0.0
    for case in cases:
        name = type(case.model.module).__name__
        strategies = (_STRATEGY, _TOKENS) if mode == STAY and sends_tokens(name) else (_STRATEGY,)
        for strategy in strategies if mode in case.modes else ():
            forward = make_module_forward(case.model, layouts, Placement(strategy))
            args, kwargs = copy.deepcopy((case.args, case.kwargs))
            answer = _tensors(forward(ModuleCall(args, kwargs, case.rows, mode)))
            worst = max(worst, _difference(answer, case.answer))
        if mode == STAY and has_stages(name):
            worst = max(worst, _worst_in_stages(case, layouts))
    return worst


def _worst_in_stages(case: _Case, layouts: Layouts) -> float:
    """Returns the largest difference with blocks on two stages: of a whole call, and of patches that use its keys."""

    def call() -> ModuleCall:
        args, kwargs = copy.deepcopy((case.args, case.kwargs))
        return ModuleCall(args, kwargs, case.rows, case.modes[-1])

    forward, keys = make_module_forward(case.model, layouts, Placement(_STAGES)), StaleKeyCache()
    assert forward.stages is not None, "it was asked for them"
    full_answer = forward(call(), keys=keys)
    worst, answer = _difference(_tensors(full_answer), case.answer), pack(full_answer)
    assert answer is not None, "stages have looked"
    if forward.stages.flow_blocked_by(call(), keys):
        return worst
    owners = forward.stages.owners(call(), _PATCHES, keys)
    if int(owners.min()) < 0:  # no patch makes that element
        return worst
    split = ElementPatches(owners, answer.shape[1:], _PATCHES)
    for number in range(_PATCHES):
        found = forward.stages.patch(call(), ImagePatch(number, _PATCHES), keys)
        if found is not None:
            split.put(split.take(found, number), number, answer)
    forward.stages.settle()
    return max(worst, _difference(_tensors(forward.stages.in_form(answer)), case.answer))


def _cases(name: str) -> Iterator[_Case]:
    for build, inputs in CASES[name].values():
        model = TinyModel(fill(build()))
        try:
            case = _case(model, inputs, ROWS_IN_BANDS if TABLE[name].bands else ROWS_OF_A_CALL)
        except RuntimeError:  # for some calls, some versions of ComfyUI only compute one row
            case = _case(model, inputs, 1)
        yield case


def _case(model: TinyModel, inputs: Inputs, rows: int) -> _Case:
    args, kwargs = inputs(rows, *SIZE)
    kwargs["transformer_options"] = {}
    copied_args, copied_kwargs = copy.deepcopy((args, kwargs))  # a module may write to its arguments
    return _Case(model, args, kwargs, rows, _tensors(model.module(*copied_args, **copied_kwargs)))


def _tensors(answer: Any) -> list[Tensor]:
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference relative to the largest value; 2**30 for NaN and for other shapes."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float(2**30)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        difference = ((one - other).abs().max() / other.abs().max()).item()
        worst = max(worst, difference if math.isfinite(difference) else float(2**30))
    return worst


def _on_ranks(compute: Compute) -> float | str:
    """Returns the largest `compute(world)` of two forked gloo ranks, or the error of the first one on which the class's
    own code raised: another run would raise again. Raises RankFailed for a rank that died or did not end."""
    context = multiprocessing.get_context("fork")
    answers: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        for rank in range(_STRATEGY.world_size):
            reader, writer = context.Pipe(duplex=False)
            answers.append(ended.enter_context(reader))
            arguments = (compute, rank, str(Path(folder) / "store"), writer, os.getpid())
            process = context.Process(target=_rank, args=arguments, daemon=True)
            with writer:
                process.start()
            ended.callback(process.join)
            ended.callback(process.kill)
        return _collect(answers)


def _rank(compute: Compute, rank: int, store: str, writer: Connection, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    world = World(
        rank=rank,
        world_size=_STRATEGY.world_size,
        device=torch.device("cpu"),
        backend="gloo",
        store_path=store,
    )
    answer: float | str
    try:
        answer = compute(world)
    except Exception as error:
        if _is_no_outcome(error):
            raise
        answer = _in_words(error)
    writer.send_bytes(json.dumps(answer).encode())
    # The parent ends this process: an exit now could break a peer's last collective.
    time.sleep(2 * _PATIENCE)


def _is_no_outcome(error: Exception) -> bool:
    """Returns True if `error` says nothing about the class: this machine lacks a module or memory."""
    return isinstance(error, ImportError) or is_out_of_memory(error)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_WORDS]


def _collect(answers: Sequence[Connection]) -> float | str:
    waiting, worst = list(answers), 0.0
    deadline = time.monotonic() + _PATIENCE
    raised: str | None = None
    while waiting:
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready and raised is not None:
            break
        if not ready:
            silent = answers.index(waiting[0])
            raise RankFailed(silent, f"no answer within {_PATIENCE:.0f} s", reason="hang")
        for reader in filter(ready.__contains__, answers):
            waiting.remove(reader)
            try:
                answer = json.loads(reader.recv_bytes())
            except EOFError:
                rank = answers.index(reader)
                raise RankFailed(rank, "it died without a word", crashed=True, reason="exit") from None
            if isinstance(answer, float):
                worst = max(worst, answer)
            elif raised is None:
                # A rank's death makes its peer raise, maybe before the dead rank's pipe closes; report the death then.
                raised, deadline = answer, min(deadline, time.monotonic() + _NOTICE)
    return worst if raised is None else raised
