"""The one place that imports xfuser and changes it (written for 0.7.0; checked by the parity tests on both engines).

`load_xfuser` is called in a rank only, when its engine is first used: the import takes seconds and replaces torch's
group_norm. On a machine with an accelerator and triton nothing is changed. On the CPU:
- triton is imported unconditionally by xfuser.core.sparge_attention, for kernels that the CPU never runs: where it is
  not installed, empty modules stand in for it during the import only;
- xfuser.envs knows no CPU (`get_device_version`, `get_torch_distributed_backend` raise) and refuses yunchang, whose
  groups USP needs, without CUDA;
- usp.PROCESS_GROUP is left empty, though yunchang's groups work on gloo;
- the ring wants a log-sum-exp, which only the `_for_cpu` kernel of torch returns there.
"""

from __future__ import annotations

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
import torch._dynamo  # must see that triton is missing before anything stands in for it
from torch import Tensor

from ...errors import PlatformError


@dataclass(frozen=True)
class Xfuser:
    """The parts of xfuser that the engine uses."""

    distributed: ModuleType  # init_distributed_environment, initialize_model_parallel, destroy_model_parallel
    usp: ModuleType  # USP
    backends: type[Enum]  # AttentionBackendType


# USP asks the runtime state for options. The real one is bound to xfuser's own pipelines; here all options are off, and
# the attention backend is given with each call.
_RUNTIME_OPTIONS = types.SimpleNamespace(
    fp8_comms=None,
    attention_backend=None,
    runtime_config=types.SimpleNamespace(use_spargeattn_head_balance=False),
)

_loaded: Xfuser | None = None


def load_xfuser() -> Xfuser:
    """Imports xfuser, adjusted where there is no accelerator. Raises PlatformError where it cannot be imported."""
    global _loaded
    if _loaded is None:
        try:
            _loaded = _import()
        except Exception as error:
            raise PlatformError(f"engine xfuser cannot be imported ({error}); use engine native.") from error
    return _loaded


def _import() -> Xfuser:
    os.environ.setdefault("XDIT_LOGGING_LEVEL", "WARNING")  # else it prints its internals for every group
    on_cpu = not torch.cuda.is_available()
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
    return Xfuser(distributed, usp, backend.AttentionBackendType)


def _import_for_cpu() -> None:
    """Executes the package after its `envs` have learned of the CPU; its __init__ would read them too early."""
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict[str, object] | None = None,
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
    """A module whose every attribute is another one, and a decorator that leaves what it decorates alone."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self
