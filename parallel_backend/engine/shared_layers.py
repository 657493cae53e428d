"""The layers of a text encoder shared out over ranks, in order: the rank with a layer's weights computes it and sends
the output to all ranks. Every rank computes the code around the layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import RequestError
from ..wire.heartbeat import heartbeat
from .comm.collectives import broadcast
from .comm.groups import Layouts, World

Meet = Callable[[Exception | None], None]

_FORM_BYTES = 16 * 1024  # for the description of a layer's output, which is a few tensors
_LEAST = 2  # a list of layers has at least this many


def find_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers to share out, in order: the modules of each outermost ModuleList of one class."""
    for child in module.children():
        if (
            isinstance(child, nn.ModuleList)
            and len(child) >= _LEAST
            and len({type(one) for one in child}) == 1
        ):
            yield from child
        else:
            yield from find_layers(child)


def assign_owners(layers: list[nn.Module], ranks: int) -> list[int]:
    """Returns the rank of each layer, in ascending order; each rank gets about the same number of bytes."""
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    total, before, owners = max(sum(sizes), 1), 0, []
    for size in sizes:
        owners.append(min(ranks - 1, (2 * before + size) * ranks // (2 * total)))
        before += size
    return owners


def share_layers(module: nn.Module, layouts: Layouts, meet: Meet) -> None:
    """Drops the weights of other ranks' layers of `module`; each layer's calls are then computed by the rank that has
    its weights. `meet(error)`: called by all ranks after each layer; raises on all of them if one has an error."""
    layers = list(find_layers(module))
    for layer, owner in zip(layers, assign_owners(layers, layouts.world.world_size), strict=True):
        if owner != layouts.world.rank:
            _drop_weights(layer)
        layer.forward = partial(_answer, layouts, meet, owner, layer.forward)


def _drop_weights(layer: nn.Module) -> None:
    for part in layer.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(0, dtype=parameter.dtype)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _answer(
    layouts: Layouts, meet: Meet, owner: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Returns the output of the owner's `forward` on every rank. Collective."""
    leaves: list[Any] = []
    form, error = "", None
    if owner == layouts.world.rank:
        try:
            leaves, form = flatten(forward(*args, **kwargs))
        except Exception as failure:
            error = failure
    meet(error)
    return send_tree(leaves, form, owner, layouts, "the wait for a layer")


def flatten(tree: Any) -> tuple[list[Any], str]:
    """Returns the tensors and plain values in an answer, and its form, for `send_tree`. Raises RequestError if there
    are too many."""
    leaves, structure = pytree.tree_flatten(tree)
    form = json.dumps([[_leaf_form(one) for one in leaves], pytree.treespec_dumps(structure)])
    if len(form) > _FORM_BYTES:
        raise RequestError("A layer of the text encoder answers with more than devices can share out.")
    return leaves, form


def send_tree(leaves: list[Any], form: str, owner: int, layouts: Layouts, waiting: str) -> Any:
    """Returns the tree that the rank `owner` has flattened, on every rank; others pass [] and "". `waiting`: one of the
    heartbeat's COLLECTIVES. Collective."""
    world = layouts.world
    forms, structure = json.loads(_send_form(world, owner, form, waiting))
    if owner != world.rank:
        leaves = [_make_leaf(one, world.device) for one in forms]
    for place, one in enumerate(forms):
        if "dtype" in one:
            leaves[place] = _spread(layouts, owner, leaves[place], waiting)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(structure))


def _leaf_form(leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, Tensor):
        return {"value": leaf}  # json refuses values that are not plain
    dtype = str(leaf.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(leaf.shape), "is_on_host": leaf.device.type == "cpu"}


def _make_leaf(form: dict[str, Any], device: torch.device) -> Any:
    if "value" in form:
        return form["value"]
    where = torch.device("cpu") if form["is_on_host"] else device
    return torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=where)


def _send_form(world: World, owner: int, form: str, waiting: str) -> bytes:
    words = torch.frombuffer(bytearray(form.encode().ljust(_FORM_BYTES, b"\0")), dtype=torch.uint8)
    with heartbeat.inside(waiting, range(world.world_size)):
        dist.broadcast(words, owner, group=world.control)
    return words.numpy().tobytes().rstrip(b"\0")


def _spread(layouts: Layouts, owner: int, tensor: Tensor, waiting: str) -> Tensor:
    world = layouts.world
    tensor = tensor.contiguous()
    if tensor.device.type == world.device.type:
        return broadcast(tensor, owner, layouts.everyone)
    with heartbeat.inside(waiting, range(world.world_size)):
        dist.broadcast(tensor, owner, group=world.control)
    return tensor
