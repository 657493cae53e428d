"""Decorators that make a test-only node from one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from comfy_api.latest import io

NODES: list[type[io.ComfyNode]] = []


def node(
    node_id: str, inputs: Sequence = (), outputs: Sequence = (), *, anew: bool = False, **schema: Any
) -> Callable[[Callable], Callable]:
    """Returns a decorator that makes a node from a function, which returns the output or a list of several. `anew`: the
    node runs in each prompt, and ComfyUI never takes its output from the cache."""

    def register(run: Callable) -> Callable:
        def define_schema(cls) -> io.Schema:
            sockets = {"inputs": list(inputs), "outputs": list(outputs)}
            return io.Schema(node_id=node_id, category="parallel/testing", **sockets, **schema)

        def execute(cls, **given: Any) -> io.NodeOutput:
            found = run(**given)
            if isinstance(found, io.NodeOutput):
                return found
            return io.NodeOutput(*([found] if len(outputs) == 1 else found or ()))

        methods = {"define_schema": classmethod(define_schema), "execute": classmethod(execute)}
        if anew:
            methods["fingerprint_inputs"] = classmethod(lambda cls, **given: float("nan"))
        NODES.append(type(node_id, (io.ComfyNode,), methods))
        return run

    return register


def save(node_id: str, value: Any, **schema: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator for a node at the end of a graph, which writes a value to a path."""
    return node(node_id, [value, io.String.Input("path")], is_output_node=True, **schema)
