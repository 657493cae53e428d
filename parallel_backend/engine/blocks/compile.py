"""A model's blocks compiled by torch.compile, with one graph for all blocks of a class; what fails runs uncompiled.

This is regional compilation (PyTorch recipes), like diffusers' compile_repeated_blocks, but for each block's forward
only. The hooks around it, which gather sharded weights, stay outside the graph.
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

# The most versions compiled of each class of block. The first image size takes one and all other sizes together one or
# two more. Single images and batches need separate versions; so do other dtypes and other splits of the weights.
MAX_VERSIONS = 12


class Compiler:
    """Compiles classes of blocks for this process, and counts what it compiled.

    The first shape of a class is compiled for that shape only, which is fastest. All later shapes share versions for
    any number of tokens. `on_begin()` is called each time before a graph is compiled.
    """

    def __init__(self, backend: str) -> None:
        import torch._dynamo  # takes a second to import

        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before 2.7
        setattr(config, limit, MAX_VERSIONS)
        config.suppress_errors = True  # what torch cannot compile runs uncompiled
        self.on_begin: Callable[[], None] = lambda: None
        self._backend = torch._dynamo.lookup_backend(backend)
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        self._problems: dict[type[nn.Module], str] = {}  # why a class cannot be one graph
        self._left_out: dict[type[nn.Module], None] = {}  # those of them that ran since the last `take`
        self._started = 0.0
        self._graphs, self._seconds, self._uncompiled, self._problem = 0, 0.0, 0, ""

    def run_compiled(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward of a block, whose attention is an operator, as one graph, or uncompiled if it cannot be one.

        The first shape is compiled with fixed sizes; a size that differs in a later call is dynamic from then on.
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
                pass  # the existing versions still serve the calls that they fit
            except torch._dynamo.exc.TorchDynamoException as error:  # while tracing: no part of the block ran
                self._problems[kind] = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
        if kind in self._problems:
            self._left_out[kind] = None
        self._uncompiled += 1
        return kind.forward(block, *args, **kwargs)

    def take(self) -> CompileStats:
        """Returns the counts since the last call, and resets them and `notes`."""
        done = CompileStats(self._graphs, self._seconds, self._uncompiled)
        self._graphs, self._seconds, self._uncompiled = 0, 0.0, 0
        self._left_out.clear()
        return done

    def notes(self) -> list[str]:
        """Returns notes for the user on what ran uncompiled since the last `take`."""
        if self._problem:
            return [f"torch.compile failed, so blocks ran uncompiled: {self._problem}; set compile to off"]
        if self._left_out:
            return [
                f"blocks {kind.__name__} ran uncompiled: torch.compile cannot make one graph of them "
                f"({self._problems[kind]})"
                for kind in self._left_out
            ]
        if self._uncompiled:
            return [
                f"some blocks ran uncompiled: {MAX_VERSIONS} versions of a block are the most, and this request would "
                f"have needed another; stop the processes (sidebar tab Parallel) to begin anew, or set compile to off"
            ]
        return []

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compiles a graph; a torch.compile backend. Counts the seconds since `_started`, when torch began to trace."""
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
    """Returns this process's only compiler: torch keeps compiled code per process."""
    return Compiler(os.environ.get(COMPILE_BACKEND) or "inductor")


def start_compiler(device_type: str) -> tuple[Compiler | None, list[str]]:
    """Returns (this process's compiler, []), or (None, notes for the user) if it cannot compile for the device."""
    reason = why_not(device_type)
    if reason is None:
        try:
            return compiler(), []
        except Exception as error:  # a Python that this torch cannot compile for, say
            words = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            reason = f"torch.compile does not start ({words}); set compile to off"
    return None, [f"blocks ran uncompiled: {reason}"]


def why_not(device_type: str) -> str | None:
    """Returns what this machine lacks to compile for a device, with the remedy; None if nothing is missing."""
    if os.environ.get(COMPILE_BACKEND):
        return None
    if device_type == "cpu":
        name = os.environ.get("CXX", "g++")
        if shutil.which(name) is None:
            return f"there is no C++ compiler ({name}); install g++, or set compile to off"
        if " " in torch.__file__:  # inductor passes the path to the compiler unquoted
            return "torch lies in a folder with a space in its name, which its compiler cannot read; set compile to off"
        return None
    if find_spec("triton") is None:
        return "the package triton is not installed; install it, or set compile to off"
    requested = os.environ.get("CC")
    if not any(shutil.which(found) for found in ([requested] if requested else ("gcc", "clang", "cc"))):
        return f"there is no C compiler ({requested or 'gcc'}); install gcc, or set compile to off"
    return None


def _beyond_max_versions() -> type[Exception]:
    """Returns the error that torch raises if a block would need more than MAX_VERSIONS versions."""
    names = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")  # the second one before 2.7
    found: type[Exception] = next(filter(None, (getattr(torch._dynamo.exc, name, None) for name in names)))
    return found


def _with_plain_strides(argument: Any) -> Any:
    """Gives tokens the strides of a new tensor, so that different views need no separate versions: the first block gets
    them with other strides than the next blocks."""
    if not isinstance(argument, Tensor) or argument.ndim != 3 or not argument.is_floating_point():
        return argument
    return argument if 0 in argument.stride() else argument.contiguous().flatten().view(argument.shape)
