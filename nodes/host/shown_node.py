"""The node that runs, as ComfyUI's page knows it: of one that another has made on the way, as loops do, the node that
stands for it there."""

from __future__ import annotations

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context


def shown_node() -> tuple[str, str] | None:
    """(prompt id, node id) of what runs in this thread; None where no prompt does."""
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)
