"""The call of a diffusion model as ComfyUI's BaseModel makes it."""

from __future__ import annotations

from torch import Tensor

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
OWN_OPTIONS = "parallel_"  # how the names of the pack's own options begin


def row_count(latent: Tensor | list[Tensor]) -> int:
    """Rows of a latent, or of one that is in several parts (video and sound)."""
    return len(latent) if isinstance(latent, Tensor) else len(latent[0])
