"""Where the parameters of a module over a mapped file go: all of them to the device, or a share of each block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...layout import stage_blocks
from ..base import ModelPart, WeightSharding
from ..staging import StagedReader
from ..tensor_pieces import as_built, component_tensors
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
    """`model`: ComfyUI's, around the module; `dtypes`: which parameters of the module are to have, by name, where not
    the file's; `absent`: those that have no use here, for which empty ones stand; `staged`: reads what moves. That is
    copied: parameters that were there stay as they are, for whoever kept them. (Module.to would move those, and copy
    quantised ones even to where they are.)"""
    module = model.get_submodule("diffusion_model")
    if sharding is not None:
        sharding.shard(module, list(blocks_of(module)), dtypes)
    for key in absent:
        path, _, own = key.rpartition(".")
        setattr(module.get_submodule(path), own, _stand_in(module.get_parameter(key)))
    requested = {
        id(tensor): dtypes[name]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name in dtypes
    }
    there: dict[int, nn.Parameter] = {}  # a parameter may be several modules'
    for owner in model.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in there:
                there[id(parameter)] = moved(parameter, device, requested.get(id(parameter)), staged)
            setattr(owner, name, there[id(parameter)])
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = as_built(buffer.to(device), requested.get(id(buffer)))


def absent_parameters(module: nn.Module, part: ModelPart) -> list[str]:
    """Returns the parameters that only blocks of other stages of a pipeline have. Raises RequestError for a module that
    cannot be cut into stages."""
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
    """Returns the parameter on `device`, in `dtype` where one is given and it is not quantised."""
    return as_parameter(as_built(_moved(parameter, device, staged), dtype))


def _moved(parameter: nn.Parameter, device: torch.device, staged: StagedReader | None) -> Tensor:
    if isinstance(parameter, Joined):
        return parameter.on(device, (lambda piece: piece) if staged is None else staged.to_device)
    if staged is None:
        return parameter.to(device)
    pieces, assemble_tensor = component_tensors(parameter)
    return assemble_tensor([staged.to_device(piece) for piece in pieces])


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Code may ask for its dtype."""
    return nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False)


def as_parameter(value: Tensor) -> nn.Parameter:
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """What its lists hold: modules that compute one after the other, each called as one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _opened(child)
        else:
            yield from blocks_of(child)


def _opened(container: nn.Module) -> Iterator[nn.Module]:
    """What a container holds, through containers in it: UNets hand their blocks' layers different arguments, so that
    nobody calls a block as one."""
    for child in container.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from _opened(child)
        else:
            yield child
