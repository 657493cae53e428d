"""The blocks of a transformer compiled by torch.compile, one graph for all blocks of a kind, or as they are.

Regional compilation (PyTorch recipes) as diffusers' compile_repeated_blocks has it, but of each block's forward alone:
hooks around it stay outside, which gather sharded weights or keep a chunk's last text.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from ..options import COMPILE_BACKEND, CompileStats
from .attention.patch_diffusers import SharedAttention, share_attention
from .operators import AttentionOperator

# Versions that are compiled of each kind of block. One image size takes one, all others together one or two more, and
# images one by one others than several at once; more come from a change of dtype or of the split of the weights.
MOST_VERSIONS = 8
_KINDS = (FluxTransformerBlock, FluxSingleTransformerBlock)


class Blocks(Protocol):
    """How the blocks of a model's transformers run."""

    compiles: bool

    def use(self, transformer: FluxTransformer2DModel, attention: SharedAttention) -> None:
        """Makes `transformer` ready for a call whose attention is computed by `attention`."""


class PlainBlocks:
    """Blocks as they are."""

    compiles = False

    def use(self, transformer: FluxTransformer2DModel, attention: SharedAttention) -> None:
        for block in _blocks(transformer):
            block.__dict__.pop("forward", None)
        share_attention(transformer, attention)


class CompiledBlocks:
    """Blocks compiled by `compiler` for a model on `device`."""

    compiles = True

    def __init__(self, compiler: Compiler, device: torch.device) -> None:
        self._compiler = compiler
        self._device = device

    def use(self, transformer: FluxTransformer2DModel, attention: SharedAttention) -> None:
        for block in _blocks(transformer):
            if "forward" not in block.__dict__:
                block.__dict__["forward"] = functools.partial(self._compiler.run, block)
        self._compiler.attention.use(attention, self._device)
        share_attention(transformer, self._compiler.attention)


class Compiler:
    """Compiles kinds of blocks for this process, and counts it.

    The first shape that a kind meets is compiled for that shape alone, which is fastest; all others share versions for
    any number of tokens. `on_begin()` is called each time that a graph is about to be compiled.
    """

    def __init__(self, backend: str) -> None:
        import torch._dynamo  # takes a second

        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before 2.7
        setattr(config, limit, MOST_VERSIONS)
        config.suppress_errors = True  # what torch cannot compile runs as it is
        self.attention = AttentionOperator()
        self.on_begin: Callable[[], None] = lambda: None
        self._backend = torch._dynamo.lookup_backend(backend)
        self._versions = {kind: torch.compile(kind.forward, backend=self._compile) for kind in _KINDS}
        self._first: dict[tuple, tuple] = {}
        self._begun = 0.0
        self._graphs, self._seconds, self._problem = 0, 0.0, ""

    def run(
        self,
        block: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        **others: object,
    ) -> tuple[Tensor, Tensor]:
        """block.forward of diffusers' Flux."""
        kind = next(kind for kind in _KINDS if isinstance(block, kind))
        image, text = _plain(hidden_states), _plain(encoder_hidden_states)
        shape = (image.shape, text.shape)
        first = self._first.setdefault((kind, image.shape[-1], image.dtype, image.device), shape)
        if shape != first:
            for tensor, dim in ((image, 1), (text, 1), *((part, 0) for part in image_rotary_emb)):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            if len(image) > 1:
                for tensor in (image, text, temb):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        self._begun = time.perf_counter()
        return self._versions[kind](
            block,
            hidden_states=image,
            encoder_hidden_states=text,
            temb=temb,
            image_rotary_emb=image_rotary_emb,
            **others,
        )

    def take(self) -> CompileStats:
        """What was done since this was asked last."""
        done = CompileStats(self._graphs, self._seconds, self.attention.uncompiled)
        self._graphs, self._seconds, self.attention.uncompiled = 0, 0.0, 0
        return done

    def notes_on(self, done: CompileStats) -> list[str]:
        """What went otherwise than a person asked for, in words."""
        if self._problem:
            return [f"torch.compile failed, so blocks ran uncompiled: {self._problem}; set compile to off"]
        if done.uncompiled:
            return [
                f"some blocks ran uncompiled: {MOST_VERSIONS} versions of a block are the most, and this request would "
                f"have needed another; stop the ranks (sidebar tab Parallel) to begin anew, or set compile to off"
            ]
        return []

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        """A backend of torch.compile. `_begun`: torch began to trace then."""
        self.on_begin()
        try:
            compiled = self._backend(graph, inputs)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
            return graph.forward
        finally:
            now = time.perf_counter()
            self._seconds += now - self._begun
            self._begun = now
        self._graphs += 1
        return compiled


@functools.cache
def compiler() -> Compiler:
    """This process's: what torch compiled is kept per process, so there is one."""
    return Compiler(os.environ.get(COMPILE_BACKEND) or "inductor")


def why_not(device_type: str) -> str | None:
    """What this machine lacks to compile for a device, with the remedy; None where nothing is missing."""
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
    name = os.environ.get("CC")
    if not any(shutil.which(found) for found in ([name] if name else ("gcc", "clang", "cc"))):
        return f"there is no C compiler ({name or 'gcc'}); install gcc, or set compile to off"
    return None


def _blocks(transformer: FluxTransformer2DModel) -> list[nn.Module]:
    return [
        *transformer.transformer_blocks.children(),
        *transformer.single_transformer_blocks.children(),
    ]


def _plain(tensor: Tensor) -> Tensor:
    """The same with the strides of a new tensor, so that views of different kinds need no versions of their own."""
    return tensor.contiguous().flatten().view(tensor.shape)
