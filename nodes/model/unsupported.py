"""Effects that a call to the ranks cannot honour yet, refused by the name of its effect and never dropped."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from torch import Tensor

from ...parallel_backend.errors import RequestError

# Effects that reach the network through transformer_options, in a user's words.
_OPTION_EFFECTS = {
    "patches": "a model patch{by}",
    "patches_replace": "a replaced attention block{by}",
    "optimized_attention_override": "another attention function{by} ({attention})",
}
# Options of a model that are no word of a user's.
_OPTIONS_IN_WORDS = {"registered_hooks": "hooks of its prompts"}


class RunsStepwise(Exception):
    """Only ComfyUI's process can run the loop; the reason, in a user's words."""


def carried(options: Iterable[str]) -> str:
    """Why a model with these options is sampled step by step, in words."""
    return f"the model carries {', '.join(sorted(_OPTIONS_IN_WORDS.get(one, one) for one in options))}"


def refusal(effect: str, remedy: str = "take it out") -> RequestError:
    """The error for one effect; every one names the way that works."""
    return RequestError(
        f"The parallel model cannot honour {effect} yet, and does not ignore it silently; {remedy}, or use stock "
        f"loaders such as UNETLoader and KSampler for this graph."
    )


def refuse_effects(options: dict, others: dict, attention: str) -> None:
    """Raises RequestError when a model call carries what the ranks cannot honour. `attention`: where this model's
    attention is chosen instead, in words."""
    effects = [
        words.format(attention=attention, by=_by(options.get(key)))
        for key, words in _OPTION_EFFECTS.items()
        if has_entries(options.get(key))
    ]
    effects += [f"the conditioning {key!r}" for key, value in others.items() if value is not None]
    if effects:
        raise refusal(" and ".join(effects))


def _by(nested: object) -> str:
    """Whose functions and objects those are, in words, each once: a node's own functions are named after its class."""
    found = dict.fromkeys(_makers(nested))
    return f" by {' and '.join(found)}" if found else ""


def _makers(nested: object) -> Iterator[str]:
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, (list, tuple)):
        for one in nested:
            yield from _makers(one)
    elif nested is not None and not isinstance(nested, (bool, int, float, str, Tensor)):
        owner = nested.__self__ if inspect.ismethod(nested) else nested
        name = getattr(owner, "__qualname__", type(owner).__qualname__).split(".")[0]
        yield owner.__module__ if name == "<lambda>" else name


def has_entries(nested: object) -> bool:
    """Patches, wrappers and callbacks come as dicts of dicts of lists, often all empty."""
    if isinstance(nested, dict):
        return any(has_entries(value) for value in nested.values())
    if isinstance(nested, Tensor):
        return True
    return bool(nested)
