"""The call of a diffusion model as ComfyUI's BaseModel makes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

OPTIONS = "transformer_options"
# What ComfyUI's sampling alone does with a call: wrappers have run by then (those of EasyCache and of context windows
# keep their state there), and weights are fetched elsewhere.
HOST_ONLY = frozenset(
    {
        "wrappers",
        "callbacks",
        "uuids",
        "prefetch_dynamic_vbars",
        "multigpu_thread_device",
        "multigpu_thread_pool",
        "easycache",
        "context_window",
        "patches",
        "patches_replace",
        "ar_state",
        "ar_config",
    }
)
PACK_OPTIONS = "parallel_"  # how the names of the pack's own options begin


def row_count(latent: Tensor | list[Tensor]) -> int:
    """Rows of a latent, or of one that is in several parts (video and sound)."""
    return len(latent) if isinstance(latent, Tensor) else len(latent[0])


def find_constants(conds: Any) -> set[str]:
    """Names of the arguments that ComfyUI hands to any number of rows as they are (conds.CONDConstant). `conds`: a
    guider's, of each side a list of prompts; what another pack's guider has in another form names none."""
    from comfy.conds import CONDConstant

    sides = conds.values() if isinstance(conds, Mapping) else ()
    prompts = [one for side in sides for one in side or () if isinstance(one, Mapping)]
    values = [prompt.get("model_conds") or {} for prompt in prompts]
    return {name for found in values for name, value in found.items() if isinstance(value, CONDConstant)}


def has_joint_rows(values: Iterable[Any], rows: int, is_described: bool) -> bool:
    """Tells whether such arguments may be about several of the rows: a tensor has as many lines, or nobody has
    described how their class reads tensors."""
    tensors = [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]
    return any(not is_described or (one.ndim > 0 and len(one) == rows) for one in tensors)
