"""A decorator that makes a node from one function, in the form in which most packs write their classes."""

from __future__ import annotations

from collections.abc import Callable

NODE_CLASS_MAPPINGS: dict[str, type] = {}


def node(name: str, output: str = "MODEL", **inputs: str) -> Callable[[Callable], Callable]:
    """Returns a decorator that registers a function as a node. `inputs`: the type of each of its inputs."""

    def register(run: Callable) -> Callable:
        NODE_CLASS_MAPPINGS[name] = type(
            name,
            (),
            {
                "CATEGORY": "parallel/testing",
                "FUNCTION": "run",
                "RETURN_TYPES": (output,),
                "INPUT_TYPES": classmethod(
                    lambda cls: {"required": {one: (kind,) for one, kind in inputs.items()}}
                ),
                "run": lambda self, **given: (run(**given),),
            },
        )
        return run

    return register
