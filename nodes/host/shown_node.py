"""The running node as ComfyUI's page shows it. A node that another one made during the run, as loops do, is shown as
the node that stands for it on the page."""

from __future__ import annotations

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context


def shown_node() -> tuple[str, str] | None:
    """Returns (prompt id, node id) of the node that runs in this thread; None outside of a prompt."""
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)
