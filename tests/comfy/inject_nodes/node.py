"""A decorator that makes a test-only node from one function, whose signature lists the node's sockets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

from comfy_api.latest import io

NODES: list[type[io.ComfyNode]] = []
_WIDGETS = {int: io.Int, float: io.Float, str: io.String, bool: io.Boolean}


def node(node_id: str, *, anew: bool = False, **schema: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that makes a node from a function. A parameter's annotation is the input's type, such as int
    or io.Model, and an input with a default is optional; the result's annotation is the output's type, a tuple that of
    several. `anew`: the node runs in each prompt, and ComfyUI never takes its output from the cache."""

    def register(run: Callable) -> Callable:
        signature = inspect.signature(run, eval_str=True)
        inputs = [_input(parameter) for parameter in signature.parameters.values()]
        kinds = get_args(signature.return_annotation) or (signature.return_annotation,)
        outputs = [_WIDGETS.get(kind, kind).Output() for kind in kinds if kind is not signature.empty]

        def define_schema(cls) -> io.Schema:
            sockets = {"inputs": inputs, "outputs": outputs}
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


def _input(parameter: inspect.Parameter) -> io.Input:
    kind = _WIDGETS.get(parameter.annotation, parameter.annotation)
    if parameter.default is parameter.empty:
        return kind.Input(parameter.name)
    default = {} if parameter.default is None else {"default": parameter.default}
    return kind.Input(parameter.name, optional=True, **default)
