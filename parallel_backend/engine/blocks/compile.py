"""A model's blocks compiled by torch.compile, one graph for all blocks of a kind, or as they are.

Regional compilation (PyTorch recipes) as diffusers' compile_repeated_blocks has it, but of each block's forward alone:
hooks around it stay outside, which gather sharded weights.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ...options import COMPILE_BACKEND, CompileStats

# Versions that are compiled of each kind of block. One image size takes one, all others together one or two more, and
# images one by one others than several at once; more come from a change of dtype or of the split of the weights.
MAX_VERSIONS = 12


class Compiler:
    """Compiles kinds of blocks for this process, and counts it.

    The first shape that a kind meets is compiled for that shape alone, which is fastest; all others share versions for
    any number of tokens. `on_begin()` is called each time that a graph is about to be compiled.
    """

    def __init__(self, backend: str) -> None:
        import torch._dynamo  # takes a second

        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before 2.7
        setattr(config, limit, MAX_VERSIONS)
        config.suppress_errors = True  # what torch cannot compile runs as it is
        self.on_begin: Callable[[], None] = lambda: None
        self._backend = torch._dynamo.lookup_backend(backend)
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        self._problems: dict[type[nn.Module], str] = {}  # why a class cannot be one graph
        self._left_out: dict[type[nn.Module], None] = {}  # of these, what ran since it was asked last
        self._left_out_before: tuple[type[nn.Module], ...] = ()
        self._started = 0.0
        self._graphs, self._seconds, self._uncompiled, self._problem = 0, 0.0, 0, ""

    def run_compiled(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a block whose attention is an operator, as one graph. What cannot be one runs as it is.

        The first shape is compiled for itself; what differs in a later one is dynamic from then on.
        """
        kind = type(block)
        if kind not in self._problems:
            if kind not in self._compiled:
                self._compiled[kind] = torch.compile(kind.forward, backend=self._compile, fullgraph=True)
            self._started = time.perf_counter()
            try:
                plain = {name: _with_plain_strides(value) for name, value in kwargs.items()}
                return self._compiled[kind](block, *map(_with_plain_strides, args), **plain)
            except _beyond_max_versions():
                pass  # versions that there are go on serving what they fit
            except torch._dynamo.exc.TorchDynamoException as error:  # while tracing: nothing of the block ran
                self._problems[kind] = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
        if kind in self._problems:
            self._left_out[kind] = None
        self._uncompiled += 1
        return kind.forward(block, *args, **kwargs)

    def take(self) -> CompileStats:
        """Takes the counts of what was done since this was asked last."""
        done = CompileStats(self._graphs, self._seconds, self._uncompiled)
        self._graphs, self._seconds, self._uncompiled = 0, 0.0, 0
        self._left_out_before, self._left_out = tuple(self._left_out), {}
        return done

    def notes_on(self, done: CompileStats) -> list[str]:
        """Notes on what went otherwise than a person asked for. `done`: what `take` gave last."""
        if self._problem:
            return [f"torch.compile failed, so blocks ran uncompiled: {self._problem}; set compile to off"]
        if self._left_out_before:
            return [
                f"blocks {kind.__name__} ran uncompiled: torch.compile cannot make one graph of them "
                f"({self._problems[kind]})"
                for kind in self._left_out_before
            ]
        if done.uncompiled:
            return [
                f"some blocks ran uncompiled: {MAX_VERSIONS} versions of a block are the most, and this request would "
                f"have needed another; stop the processes (sidebar tab Parallel) to begin anew, or set compile to off"
            ]
        return []

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """A backend of torch.compile. `_begun`: torch began to trace then."""
        self.on_begin()
        try:
            compiled = self._backend(graph, inputs)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
            return graph.forward
        finally:
            now = time.perf_counter()
            self._seconds += now - self._started
            self._started = now
        self._graphs += 1
        return compiled


@functools.cache
def compiler() -> Compiler:
    """This process's: what torch compiled is kept per process, so there is one."""
    return Compiler(os.environ.get(COMPILE_BACKEND) or "inductor")


def start_compiler(device_type: str) -> tuple[Compiler | None, list[str]]:
    """(this process's compiler for blocks on a device, []), or (None, what there is to say about its lack)."""
    reason = why_not(device_type)
    if reason is None:
        try:
            return compiler(), []
        except Exception as error:  # a Python that this torch cannot compile for, say
            words = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            reason = f"torch.compile does not start ({words}); set compile to off"
    return None, [f"blocks ran uncompiled: {reason}"]


def why_not(device_type: str) -> str | None:
    """The lack that keeps this machine from compiling for a device, with the remedy; None where nothing is missing."""
    if os.environ.get(COMPILE_BACKEND):
        return None
    if device_type == "cpu":
        name = os.environ.get("CXX", "g++")
        if shutil.which(name) is None:
            return f"there is no C++ compiler ({name}); install g++, or set compile to off"
        if " " in torch.__file__:  # inductor hands it to the compiler as it is
            return "torch lies in a folder with a space in its name, which its compiler cannot read; set compile to off"
        return None
    if find_spec("triton") is None:
        return "the package triton is not installed; install it, or set compile to off"
    requested = os.environ.get("CC")
    if not any(shutil.which(found) for found in ([requested] if requested else ("gcc", "clang", "cc"))):
        return f"there is no C compiler ({requested or 'gcc'}); install gcc, or set compile to off"
    return None


def _beyond_max_versions() -> type[Exception]:
    """Returns the error that torch raises where a block of one graph would need more than MAX_VERSIONS versions."""
    names = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")  # the second one before 2.7
    found: type[Exception] = next(filter(None, (getattr(torch._dynamo.exc, name, None) for name in names)))
    return found


def _with_plain_strides(argument: Any) -> Any:
    """Tokens come to a first block in other strides than to the next ones."""
    is_tokens = isinstance(argument, Tensor) and argument.ndim == 3 and argument.is_floating_point()
    return _plain(argument) if is_tokens and 0 not in argument.stride() else argument


def _plain(tensor: Tensor) -> Tensor:
    """The same with the strides of a new tensor, so that views of different kinds need no versions of their own."""
    return tensor.contiguous().flatten().view(tensor.shape)
