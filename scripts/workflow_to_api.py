"""Turns a workflow as ComfyUI's editor saves it into the prompt that its HTTP API runs.

The editor's format keeps widget values as a bare list, in the order of the node's inputs, so the names come from the
running ComfyUI's ``/object_info``. A node that is not installed, or a saved list that no longer fits its node, is an
error here, because a person would see it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# A combo whose options can have inputs of their own, such as SaveVideo's codec.
_DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
_WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", _DYNAMIC_COMBO}
_CONTROL_VALUES = {"fixed", "increment", "decrement", "randomize"}
_NOTES = {"Note", "MarkdownNote"}
_MUTED, _BYPASSED = 2, 4  # LiteGraph's node modes


class WorkflowError(Exception):
    """The workflow cannot be run as saved; the message names the node and the reason."""


def workflow_to_api(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the prompt (node id -> class_type and inputs) of a saved workflow.

    Muted nodes are left out. Bypassed nodes pass on their first linked input of the output's type. Reroutes and
    primitive nodes are resolved.

    Raises:
        WorkflowError: a node is not installed, its saved values do not fit it, or the workflow uses subgraphs.
    """
    if workflow.get("definitions", {}).get("subgraphs"):
        raise WorkflowError("the workflow uses subgraphs, which this converter does not resolve")
    graph = _Graph(workflow)
    prompt = {}
    for node in graph.nodes.values():
        kind = node["type"]
        if kind in _NOTES or kind in ("Reroute", "PrimitiveNode") or node.get("mode") in (_MUTED, _BYPASSED):
            continue
        if kind not in object_info:
            raise WorkflowError(f"node {node['id']}: {kind} is not installed in this ComfyUI")
        inputs = dict(_widget_values(node, object_info[kind]))
        for socket in node.get("inputs", []):
            if socket.get("link") is not None:
                source = graph.source(socket["link"])
                if source is not None:
                    inputs[socket["name"]] = source
        title = node.get("title") or object_info[kind].get("display_name") or kind
        prompt[str(node["id"])] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
    return prompt


class _Graph:
    """The saved nodes and links, by id."""

    def __init__(self, workflow: dict[str, Any]) -> None:
        self.nodes = {node["id"]: node for node in workflow["nodes"]}
        self.links: dict[int, tuple[int, int]] = {}
        for link in workflow.get("links", []):
            if isinstance(link, dict):
                self.links[link["id"]] = (link["origin_id"], link["origin_slot"])
            else:
                self.links[link[0]] = (link[1], link[2])

    def source(self, link: int) -> Any:
        """Returns what a link delivers: ``[node id, slot]``, a primitive's value, or None if it delivers nothing."""
        node_id, slot = self.links[link]
        node = self.nodes[node_id]
        if node["type"] == "PrimitiveNode":
            return node["widgets_values"][0]
        if node.get("mode") == _MUTED:
            return None
        if node["type"] == "Reroute" or node.get("mode") == _BYPASSED:
            wanted = node["outputs"][slot]["type"]
            for socket in node.get("inputs", []):
                fits = node["type"] == "Reroute" or socket["type"] == wanted
                if fits and socket.get("link") is not None:
                    return self.source(socket["link"])
            return None
        return [str(node_id), slot]


def _widget_values(node: dict[str, Any], info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (input name, saved value) for each widget of the node."""
    saved = node.get("widgets_values") or []
    if isinstance(saved, dict):
        yield from ((name, saved[name]) for name, _, _ in widgets(info) if name in saved)
        return
    position, waiting = 0, list(widgets(info))
    while waiting:
        name, kind, options = waiting.pop(0)
        if position >= len(saved) and options.get("hidden"):
            continue
        if position >= len(saved):
            # The workflow is older than this input; the editor fills in the default as well.
            value = _default(options, node, name)
        else:
            value = saved[position]
            position += 1
        yield name, value
        if kind == _DYNAMIC_COMBO:
            waiting = [*_inputs_of_choice(name, value, options), *waiting]
        follows = saved[position] if position < len(saved) else None
        has_control = options.get("control_after_generate") or (
            kind == "INT" and name in ("seed", "noise_seed")
        )
        if (has_control and follows in _CONTROL_VALUES) or (
            options.get("image_upload") and follows == "image"
        ):
            position += 1
    if position < len(saved):
        unused = ", ".join(repr(value) for value in saved[position:])
        raise WorkflowError(f"node {node['id']} ({node['type']}): saved values that fit no input: {unused}")


def _default(options: dict[str, Any], node: dict[str, Any], name: str) -> Any:
    """Returns an input's default value. Raises WorkflowError if it has none."""
    if "default" in options:
        return options["default"]
    choices = options.get("options")
    if choices and isinstance(choices[0], dict):
        return choices[0]["key"]
    raise WorkflowError(f"node {node['id']} ({node['type']}): no saved value for {name!r}")


def _inputs_of_choice(
    name: str, chosen: str, options: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the widgets that an option adds; the editor shows them after it, and a prompt calls them `name.input`."""
    for option in options["options"]:
        if option["key"] == chosen:
            yield from ((f"{name}.{own}", *rest) for own, *rest in widgets({"input": option["inputs"]}))


def widgets(info: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (name, type, options) of the inputs that the editor shows as widgets, in its order."""
    for group in ("required", "optional"):
        inputs = info["input"].get(group, {})
        for name in info.get("input_order", {}).get(group, inputs):
            kind, *rest = inputs[name]
            options = rest[0] if rest else {}
            # A socket that takes several types says which one its widget edits.
            kind = "COMBO" if isinstance(kind, list) else options.get("widgetType", kind)
            if kind in _WIDGET_TYPES and not options.get("forceInput"):
                yield name, kind, options
