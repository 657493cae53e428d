"""ComfyUI's server towards its page: the running node as the page shows it, and events for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's


def comfyui_server() -> PromptServer | None:
    """Returns the running server; None if ComfyUI's code runs without one."""
    from server import PromptServer  # imports ComfyUI's whole server, so not at module load

    return getattr(PromptServer, "instance", None)


def shown_node() -> tuple[str, str] | None:
    """Returns (prompt id, node id) of the node that runs in this thread; None outside of a prompt. A node that another
    one made during the run, as loops do, is shown as the node that stands for it on the page."""
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)


def send_event(event: str, data: dict[str, object]) -> None:
    """Sends an event to the page that queued the running prompt, if a page did."""
    server = comfyui_server()
    client = getattr(server, "client_id", None)
    if client is not None:
        server.send_sync(event, data, client)
