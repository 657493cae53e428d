"""The prompt that ComfyUI validates or runs now, as data: the nodes that a node's links lead to, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from comfy_execution.utils import get_executing_context

import nodes

from .page import comfyui_server
from .prompt_graph import ENCODER, LOADERS, Prompt, class_of, inputs_of, links, needed, with_those_before

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

# The prompt of the current HTTP request: ComfyUI validates a prompt in the asyncio task that received it.
_validated: ContextVar[Prompt | None] = ContextVar("validated_prompt", default=None)


def begin(server: PromptServer) -> None:
    """Registers a handler that notes each prompt that ComfyUI receives from now on."""

    def remember(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt")
        _validated.set(prompt if isinstance(prompt, dict) else None)
        return body

    server.add_on_prompt_handler(remember)


def current_node() -> tuple[Prompt, str] | None:
    """Returns the prompt and the id of its node that is validated or runs in this thread; None if that is unknown."""
    context = get_executing_context()
    if context is None:
        return None
    prompt = _validated.get() or running_prompts().get(context.prompt_id)
    return (prompt, context.node_id) if prompt and context.node_id in prompt else None


def running_node() -> str | None:
    """Returns the id of the node that runs in this thread; None outside of a prompt."""
    context = get_executing_context()
    return None if context is None else str(context.node_id)


def title_of(prompt: Prompt, node: str) -> str:
    """Returns a node as the page shows it: its title and id."""
    kind = class_of(prompt, node)
    shown = nodes.NODE_DISPLAY_NAME_MAPPINGS.get(kind, kind)
    meta = prompt.get(node, {}).get("_meta")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    return f'"{title or shown}" (#{node})'


def models_before(prompt: Prompt, node: str) -> list[str]:
    """Lists the nodes that a MODEL passes through on its way to `node`, the loader first."""
    found: list[str] = []
    while node in prompt and node not in found:
        found.insert(0, node)
        origins = [
            (name, one)
            for name, one, output in links(inputs_of(prompt, node))
            if type_of(prompt, one, output) == "MODEL"
        ]
        node = next((one for _, one in sorted(origins, key=lambda item: item[0] != "model")), "")
    return found[:-1]


def clip_before(prompt: Prompt, node: str) -> tuple[str, int] | None:
    """Returns (node, index of its output) that gives `node` a CLIP; None if no node does, or several do."""
    found = [
        (one, output)
        for _, one, output in links(inputs_of(prompt, node))
        if class_of(prompt, one) == ENCODER or type_of(prompt, one, output) == "CLIP"
    ]
    return found[0] if len(found) == 1 else None


def type_of(prompt: Prompt, node: str, output: int) -> str | None:
    """Returns the type of a node's output; None if the class of the node is unknown or has no such output."""
    kind = nodes.NODE_CLASS_MAPPINGS.get(class_of(prompt, node))
    return next(iter(getattr(kind, "RETURN_TYPES", ())[output : output + 1]), None)


def running_prompt() -> Prompt | None:
    """Returns the prompt that runs in this thread; None outside of one."""
    context = get_executing_context()
    return None if context is None else running_prompts().get(context.prompt_id)


def running_prompts() -> dict[str, Prompt]:
    """Returns the prompts that run now, by id. Looks in ComfyUI's queue, and changes nothing there."""
    server = comfyui_server()
    running = [] if server is None else server.prompt_queue.get_current_queue_volatile()[0]
    return {item[1]: item[2] for item in running}


def loaders_for(prompt: Prompt, selector: str, *, run: bool) -> list[str]:
    """Lists the loaders for whose models this Strategy Selector decides: those linked to it, and those of samplers that
    are linked to it. `run`: only those that some output node needs."""
    known = nodes.NODE_CLASS_MAPPINGS
    outputs = [node for node in prompt if getattr(known.get(class_of(prompt, node)), "OUTPUT_NODE", False)]
    found: list[str] = []
    for node in needed(prompt, outputs) if run else prompt:
        given = {name: origin for name, origin, _ in links(inputs_of(prompt, node))}
        if given.get("strategy") == selector:
            path = with_those_before(prompt, node, "parallel_model")
            loader = next((one for one in path if class_of(prompt, one) in LOADERS), None)
            if loader is not None and loader not in found:
                found.append(loader)
    return found
