"""Decides how to share out each call of a job's network, by the foreign code in it. All ranks decide the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import torch
from torch import Tensor, nn

from ...engine.attention.kernels import OVERRIDE
from ...job.changes import HOOKS, is_note, is_put_back
from ...job.purity import is_pure, purity_of
from ...job.restore import Replaced
from ...models.base import find_module
from ...models.comfyui.attention_router import is_attention, unrouted
from ...models.comfyui.calls import HOST_ONLY, OPTIONS, PACK_OPTIONS
from ...models.proof.states import ClassVerdict, trusted_mode
from ...models.tokens.regions import Region
from ...requests import ATTENTION, BLOCK, TOKEN_MODES

# Patches that a module calls between its blocks: they see all tokens if each block gathers its output.
_BETWEEN_BLOCKS = {
    "double_block",
    "single_block",
    "post_input",
    "noise_refiner",
    "emb_patch",
    "input_block_patch",
    "output_block_patch",
    "forward_timestep_embed_patch",
}
_PLAIN = (bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, UUID)
# Python modules with the code of networks.
_NETWORK_CODE = (
    "comfy.ldm",
    "comfy.ops",
    "comfy.rmsnorm",
    "comfy.quant_ops",
    "comfy.text_encoders",
    "torch.nn",
)
_TORCHS_ATTENTION = "scaled_dot_product_attention"
SHARE = "_parallel_share"  # attribute of a network: the function that its calls go to (meeting.lead_calls)


@dataclass(frozen=True)
class Foreign:
    """The code in a call that is not ComfyUI's own. `takes_part`: True if there is any; `between`: True if it only runs
    between blocks; `is_pure`, `code`: as job/purity.py has them; `kernel`: True if it computes attention;
    `kernel_is_pure`: False if that part stores something."""

    takes_part: bool = False
    between: bool = True
    is_pure: bool = True
    kernel: bool = False
    kernel_is_pure: bool = True
    code: frozenset[Any] = frozenset()


class _Attributes:
    """The names of a module's attributes when it was loaded. `count`: of those that it had when it last had no new
    method."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._names = module, {*module.__dict__, SHARE}
        self.count = len(module.__dict__)

    def have_new_method(self) -> bool:
        """Returns True if code has set a method on the module, other than its class's own, which ComfyUI sets when it
        removes a patch."""
        state = self._module.__dict__
        new = [
            name for name in state if name not in self._names and callable(state[name]) and not is_note(name)
        ]
        if not new:
            self.count = len(state)
        return not all(is_put_back(name, self._module) for name in new)


class NetworkState:
    """The state of a network when it was loaded, to find what has changed since."""

    def __init__(self, network: nn.Module, regions: Iterable[Region]) -> None:
        self._network = network
        before, after = HOOKS[:2]
        self._before = [
            # Hooks belong to it: those that fetch shared-out weights are no change.
            (
                one,
                type(one),
                state,
                dict(one._modules),
                dict(state[before]),
                dict(state[after]),
                _Attributes(one),
            )
            for one in network.modules()
            for state in (one.__dict__,)
        ]
        self._functions = [  # and attributes in whose place one may be put
            (one, name, value)
            for one in network.modules()
            for name, value in one.__dict__.items()
            if (value is None or callable(value)) and not is_note(name)
        ]
        # By foreign code: False if it joins the rows of several prompts, or several heads of attention.
        self.apart: dict[Any, bool] = {}
        self.by_head: dict[Any, bool] = {}
        self._parts: set[int] = set()
        for path in [path for region in regions for path in region.lists]:
            blocks = find_module(network, path)
            if blocks is not None:
                self._parts |= {id(one) for one in blocks.modules()}

    @property
    def network(self) -> nn.Module:
        return self._network

    def find_changes(self) -> tuple[bool, bool]:
        """Returns (True if code of the network was changed, True if code within its blocks was)."""
        # This runs in every call, over a thousand modules: the cheap comparisons come first.
        before, after = HOOKS[:2]
        changed = [
            id(one)
            for one, kind, state, children, hooks_before, hooks_after, attributes in self._before
            if type(one) is not kind
            or state["_modules"] != children
            or state[before] != hooks_before
            or state[after] != hooks_after
            or (len(state) != attributes.count and attributes.have_new_method())
        ]
        changed += [
            id(one)
            for one, name, value in self._functions
            if (now := one.__dict__.get(name)) is not value and (callable(now) or callable(value))
        ]
        return bool(changed), not self._parts.isdisjoint(changed)


def foreign_code(replaced: Iterable[Replaced]) -> Foreign:
    """Describes what packs have replaced in the code of networks: a call's arguments do not show it."""
    code = [one for one in replaced if not isinstance(one.value, (*_PLAIN, tuple, type(None)))]
    inside = [one for one in code if one.module.startswith(_NETWORK_CODE)]
    kernels = [
        one for one in inside if not one.path and (is_attention(one.name) or one.name == _TORCHS_ATTENTION)
    ]
    purities = [purity_of(unrouted(one.value)) for one in kernels]
    only_kernels, are_pure = len(kernels) == len(inside), all(one.is_pure for one in purities)
    return Foreign(
        takes_part=bool(inside),
        between=only_kernels,
        is_pure=only_kernels and are_pure,
        kernel=bool(kernels),
        kernel_is_pure=are_pure,
        code=frozenset().union(*(one.code for one in purities)),
    )


def foreign_in(options: Mapping[str, Any], state: NetworkState, code: Foreign) -> Foreign:
    """Describes the foreign code in a call with these transformer_options. `code`: from foreign_code."""
    patches = {name: value for name, value in (options.get("patches") or {}).items() if value}
    replacing = {name: value for name, value in (options.get("patches_replace") or {}).items() if value}
    other_functions = [
        value for name, value in options.items() if name not in ("wrappers", "callbacks") and callable(value)
    ]
    keeps_state = not all(map(_is_plain, _seen_by_network(options).values()))
    around = (options.get("wrappers") or {}).get("diffusion_model", {})
    functions: list[Callable[..., Any]] = [
        *(one for value in patches.values() for one in value),
        *(one for value in replacing.values() for one in value.values()),
        *other_functions,
        *(one for value in around.values() for one in value),
    ]
    purities = list(map(purity_of, functions))
    override = options.get(OVERRIDE)
    changed, in_blocks = state.find_changes()
    between = (
        set(patches) <= _BETWEEN_BLOCKS
        and set(replacing) <= {"dit"}
        and not other_functions
        and not in_blocks
    )
    return Foreign(
        takes_part=bool(functions) or changed or keeps_state or code.takes_part,
        between=between and code.between,
        is_pure=not changed and not keeps_state and code.is_pure and all(one.is_pure for one in purities),
        kernel=code.kernel,
        kernel_is_pure=code.kernel_is_pure and (override is None or is_pure(override)),
        code=code.code.union(*(one.code for one in purities)),
    )


def _seen_by_network(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without those that only ComfyUI's sampling or the pack reads."""
    return {
        name: value
        for name, value in options.items()
        if name not in HOST_ONLY and not name.startswith(PACK_OPTIONS)
    }


def _is_plain(value: Any) -> bool:
    """Returns False for a value that contains an object of some class, in which a network may store state (Kandinsky 6
    has its step cache there)."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or callable(value) or isinstance(value, _PLAIN)


def mode_of(
    foreign: Foreign, kwargs: Mapping[str, Any], class_name: str, proven: str, has_blocks: bool
) -> str:
    """Returns the token mode of a call (TOKEN_MODES). `proven`: the mode that the class is proven for."""
    if foreign.kernel or (foreign.takes_part and not (foreign.between and has_blocks)):
        return ATTENTION
    seen = _seen_by_network(kwargs.get(OPTIONS) or {})
    usual = trusted_mode(class_name, {**kwargs, OPTIONS: seen}, ClassVerdict(proven))
    return max(BLOCK, usual, key=TOKEN_MODES.index) if foreign.takes_part else usual
