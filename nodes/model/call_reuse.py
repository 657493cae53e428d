"""Which model calls of ComfyUI's own loop go by a step cache: those of which it is certain which ones they are like.

In a job of their own loop the ranks know that (engine/blocks/step_cache.py). Here ComfyUI's process makes the calls,
and says with each one which prompts it is for and at which noise level. Where that does not tell calls apart, they are
computed whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...parallel_backend.models.comfyui.patches import ARGUMENT
from ...parallel_backend.requests import ModuleCall, Reuse
from ...parallel_backend.wire.arguments import Tree

MOST_KINDS = 8  # of calls in one run: the ranks keep two tensors of all tokens for each
_WINDOWS = "the frames are sampled in windows, which are other frames from call to call"
_UNKNOWN = "a node makes model calls without saying for which prompts"
_KEEPS_FRAMES = "what a call leaves out, later ones would miss: the model keeps its frames or references"
_TWICE = "the sampler, or a node, asks for the same prompts more than once at one noise level"
_TOO_MANY = "a node makes model calls of ever other kinds"


class CallReuse:
    """Of one sampling run. `why_whole`: why some of its calls are computed whole, in a user's words."""

    def __init__(self, threshold: float, never: str = "") -> None:
        """`never`: why none of the model's calls can be computed in part; empty where they can."""
        self.why_whole = never
        self._never = never
        self._threshold = threshold
        self._run = 1 + secrets.randbits(60)
        self._kinds: dict[Hashable, int] = {}
        self._sigmas: dict[int, float] = {}  # of the latest call of a kind
        self._ambiguous: set[int] = set()

    def of(self, call: ModuleCall, options: Mapping[str, Any]) -> Reuse:
        """For a call with these transformer_options, as ComfyUI made them."""
        prompts, sigmas = options.get("uuids"), options.get("sigmas")
        patches = call.kwargs.get(ARGUMENT)
        if self._never:
            return self._whole(self._never)
        if not prompts or not isinstance(sigmas, Tensor):
            return self._whole(_UNKNOWN)
        if options.get("context_window") is not None:
            return self._whole(_WINDOWS)
        if patches is not None and patches["run"] is not None:
            return self._whole(_KEEPS_FRAMES)
        sigma = sigmas.max().item()
        rest = {name: value for name, value in call.kwargs.items() if name != ARGUMENT}
        kind = (tuple(prompts), _form((call.args, rest)), _form(_acting(patches, sigma)))
        if kind not in self._kinds and len(self._kinds) == MOST_KINDS:
            return self._whole(_TOO_MANY)
        like = self._kinds.setdefault(kind, len(self._kinds) + 1)
        before = self._sigmas.get(like)
        self._sigmas[like] = sigma
        if like in self._ambiguous:
            return self._whole(_TWICE)
        if before == sigma:
            self._ambiguous.add(like)
            return replace(self._whole(_TWICE), like=like, last=True)
        # Where noise was added again, nothing before resembles it.
        threshold = self._threshold if before is None or sigma < before else 0.0
        return Reuse(self._run, like, threshold, _is_last(sigma, options.get("sample_sigmas")))

    def _whole(self, why: str) -> Reuse:
        self.why_whole = self.why_whole or why
        return Reuse(self._run)


def _is_last(sigma: float, sigmas: Tensor | None) -> bool:
    """Whether no step comes after one at this noise level; where nobody says, a call of another run ends this one."""
    return isinstance(sigmas, Tensor) and len(sigmas) > 1 and sigma <= sigmas[-2].item()


def _acting(patches: Mapping[str, Any] | None, sigma: float) -> Tree:
    """What patches of the model do in a call: some act between two noise levels. Their weights stay the same."""
    if patches is None:
        return None
    levels = [
        (one["values"].get("sigma_start"), one["values"].get("sigma_end")) for one in patches["objects"]
    ]
    acts = [start is None or end is None or end <= sigma <= start for start, end in levels]
    return [acts, {name: patches[name] for name in ("patches", "objects", "skipped")}]


def _form(value: Tree) -> Hashable:
    """Equal for trees of the same plain values with tensors of the same kinds in the same places."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape))
    if isinstance(value, dict):
        return ("d", *((name, _form(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("l", *map(_form, value))
    return (type(value).__name__, value)
