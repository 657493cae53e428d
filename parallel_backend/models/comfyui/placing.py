"""Moves the parameters of a module over a mapped file: all of them to the device, or a shard of each block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...layout import stage_blocks
from ..base import ModelPart, WeightSharding
from ..staging import StagedReader, as_built, component_tensors
from ..tokens.table import stage_lists
from .formats.key_layouts import Joined


def place(
    model: nn.Module,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
    sharding: WeightSharding | None,
    absent: Iterable[str] = (),
    staged: StagedReader | None = None,
) -> None:
    """Moves the parameters of `model` (ComfyUI's BaseModel). `dtypes`: by name, dtypes of the module's parameters that
    differ from the file's; `absent`: parameters not needed here, replaced by empty ones; `staged`: reads what moves.

    Copies replace the parameters, so the old ones stay valid for those who hold them. Module.to would move these, and
    copy quantised ones even if they are on the device already."""
    module = model.get_submodule("diffusion_model")
    if sharding is not None:
        sharding.shard(module, list(blocks_of(module)), dtypes)
    for key in absent:
        path, _, own = key.rpartition(".")
        empty = torch.empty(0, dtype=module.get_parameter(key).dtype)  # code may ask for the dtype
        setattr(module.get_submodule(path), own, nn.Parameter(empty, requires_grad=False))
    requested = {
        id(tensor): dtypes[name]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name in dtypes
    }
    there: dict[int, nn.Parameter] = {}  # by id: several modules may share a parameter
    for owner in model.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in there:
                there[id(parameter)] = moved(parameter, device, requested.get(id(parameter)), staged)
            setattr(owner, name, there[id(parameter)])
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = as_built(buffer.to(device), requested.get(id(buffer)))


def absent_parameters(module: nn.Module, part: ModelPart) -> list[str]:
    """Returns the names of parameters that only blocks of other pipeline stages use. Raises RequestError for a module
    that cannot be split into stages."""
    if len(part.stage_shares) == 1:
        return []
    name = type(module).__name__
    if not (paths := stage_lists(name)):
        raise RequestError(
            f"PipeFusion cannot lay out the blocks of {name} over devices; set pipefusion_degree to 1."
        )
    lists = {path: cast(nn.ModuleList, module.get_submodule(path)) for path in paths}
    blocks = [f"{path}.{number}." for path, listed in lists.items() for number in range(len(listed))]
    own = stage_blocks(len(blocks), part.stage_shares)[part.stage]
    elsewhere = tuple(path for number, path in enumerate(blocks) if number not in own)
    held = dict(module.named_parameters(remove_duplicate=False))
    here = {id(parameter) for key, parameter in held.items() if not key.startswith(elsewhere)}
    return [key for key, parameter in held.items() if id(parameter) not in here]


def moved(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None, staged: StagedReader | None
) -> nn.Parameter:
    """Returns a parameter on `device`; in `dtype`, unless that is None or the parameter is quantised."""
    value = as_built(_moved(parameter, device, staged), dtype)
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def _moved(parameter: nn.Parameter, device: torch.device, staged: StagedReader | None) -> Tensor:
    if isinstance(parameter, Joined):
        return parameter.on(device, (lambda piece: piece) if staged is None else staged.to_device)
    if staged is None:
        return parameter.to(device)
    pieces, assemble_tensor = component_tensors(parameter)
    return assemble_tensor([staged.to_device(piece) for piece in pieces])


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in its lists, which compute one after the other. Each is called as a whole."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _opened(child)
        else:
            yield from blocks_of(child)


def _opened(container: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in a container and in containers inside it. UNets pass different arguments to the layers of a
    block, so a block is not called as a whole."""
    for child in container.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from _opened(child)
        else:
            yield child
