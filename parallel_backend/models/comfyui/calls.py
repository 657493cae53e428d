"""Facts about the call that ComfyUI's BaseModel makes of a diffusion model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

OPTIONS = "transformer_options"
# Options that only ComfyUI's sampling reads, not the network: wrappers have already run (EasyCache and context windows
# keep their state here), and weights are fetched elsewhere.
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
PACK_OPTIONS = "parallel_"  # prefix of this pack's own options


def row_count(latent: Tensor | list[Tensor]) -> int:
    """Returns the rows of a latent, which may be a list of parts (video and sound)."""
    return len(latent) if isinstance(latent, Tensor) else len(latent[0])


def find_constants(conds: Any) -> set[str]:
    """Returns the names of the arguments that ComfyUI passes unchanged for any number of rows (conds.CONDConstant).
    `conds`: a guider's list of prompts per side (positive, negative). Other forms give an empty set."""
    from comfy.conds import CONDConstant

    sides = conds.values() if isinstance(conds, Mapping) else ()
    prompts = [one for side in sides for one in side or () if isinstance(one, Mapping)]
    values = [prompt.get("model_conds") or {} for prompt in prompts]
    return {name for found in values for name, value in found.items() if isinstance(value, CONDConstant)}


def has_joint_rows(values: Iterable[Any], rows: int, is_described: bool) -> bool:
    """Returns True if constant arguments may describe several rows: a tensor in `values` has `rows` entries, or the
    table does not describe the model's class (`is_described`)."""
    tensors = [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]
    return any(not is_described or (one.ndim > 0 and len(one) == rows) for one in tensors)
