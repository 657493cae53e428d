"""The one place that imports xfuser and changes it (written for 0.7.0; checked by the parity tests on both engines).

Only a rank calls `load_xfuser`, when it first uses this engine: the import takes seconds and replaces torch's
group_norm. Always replaced are xfuser's runtime state (`_RUNTIME_OPTIONS`), and the choice of a GPU: a torch built for
CUDA would otherwise need one for ranks on the CPU, and other ranks have chosen theirs. On the CPU more has to change:
- xfuser.core.sparge_attention always imports triton, for kernels that the CPU never runs. If triton is not installed,
  empty modules stand in for it during the import;
- xfuser.envs does not support the CPU: `get_device_version` and `get_torch_distributed_backend` raise. Without CUDA it
  also refuses yunchang, whose groups USP needs;
- xfuser leaves usp.PROCESS_GROUP empty, though yunchang's groups work on gloo;
- the ring needs a log-sum-exp, and on the CPU only torch's `_for_cpu` kernel returns one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import torch
import torch._dynamo  # must see that triton is missing before the stand-in is there
from torch import Tensor

from ...errors import PlatformError


@dataclass(frozen=True)
class Xfuser:
    """The parts of xfuser that the engine uses."""

    distributed: ModuleType  # init_distributed_environment, initialize_model_parallel, destroy_model_parallel
    usp: ModuleType  # USP
    backends: type[Enum]  # AttentionBackendType


# USP reads options from the runtime state. The real one belongs to xfuser's own pipelines. Here all options are off,
# and each call names its attention backend.
_RUNTIME_OPTIONS = types.SimpleNamespace(
    fp8_comms=None,
    attention_backend=None,
    runtime_config=types.SimpleNamespace(use_spargeattn_head_balance=False),
)


@functools.cache
def load_xfuser(*, on_cpu: bool) -> Xfuser:
    """Imports xfuser, and adapts it to a rank on the CPU. Raises PlatformError if the import fails."""
    try:
        return _import(on_cpu)
    except Exception as error:
        raise PlatformError(f"engine xfuser cannot be imported ({error}); use engine native.") from error


def _import(on_cpu: bool) -> Xfuser:
    os.environ.setdefault("XDIT_LOGGING_LEVEL", "WARNING")  # otherwise it prints internals for every group
    with _triton_stand_in():
        if on_cpu:
            _import_for_cpu()
        distributed = importlib.import_module("xfuser.core.distributed.parallel_state")
        usp = importlib.import_module("xfuser.model_executor.layers.usp")
        backend = importlib.import_module("xfuser.core.distributed.attention_backend")
        runtime = importlib.import_module("xfuser.core.distributed.runtime_state")
    if on_cpu:
        vars(usp)["PROCESS_GROUP"] = importlib.import_module("yunchang.globals").PROCESS_GROUP
        registry, flash = backend.ATTENTION_FUNCTION_REGISTRY, backend.AttentionBackendType.SDPA_FLASH
        registry[flash] = _flash_attention_for_cpu
    vars(runtime)["_RUNTIME"] = _RUNTIME_OPTIONS
    vars(distributed)["set_device"] = lambda device: None
    return Xfuser(distributed, usp, backend.AttentionBackendType)


def _import_for_cpu() -> None:
    """Adapts xfuser.envs to the CPU, then executes the package: its __init__ reads values from envs."""
    spec = importlib.util.find_spec("xfuser")
    if spec is None or spec.loader is None:
        raise ImportError("the package xfuser is not installed")
    package = importlib.util.module_from_spec(spec)
    sys.modules["xfuser"] = package
    try:
        envs = importlib.import_module("xfuser.envs")
        vars(envs)["get_device_version"] = lambda: "0"
        vars(envs)["get_torch_distributed_backend"] = lambda: "gloo"
        envs.PACKAGES_CHECKER.packages_info["has_long_ctx_attn"] = True
        spec.loader.exec_module(package)
    except BaseException:
        for name in [name for name in sys.modules if name == "xfuser" or name.startswith("xfuser.")]:
            del sys.modules[name]
        raise


def _flash_attention_for_cpu(
    query: Tensor, key: Tensor, value: Tensor, *unused: object, **options: object
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return out, lse.float()


@contextmanager
def _triton_stand_in() -> Iterator[None]:
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = _Anything("triton"), _Anything("triton.language")
    vars(triton).update(language=language, __path__=[])
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        yield
    finally:
        for name in ("triton", "triton.language"):
            del sys.modules[name]


class _Anything(types.ModuleType):
    """An empty module: every attribute is another such module, and used as a decorator it changes nothing."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self
