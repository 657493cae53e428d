"""What ComfyUI's page may offer: for which samplers of a prompt others wait that could be computed with it."""

from __future__ import annotations

from dataclasses import dataclass

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.errors import ParallelError
from ..host.settings import default_settings
from ..preload.named_model import settings_of
from ..preload.tail import Prompt
from .alike import SAMPLER, alike, why_alone


@dataclass(frozen=True)
class Offer:
    """`waiting`: prompts that differ from this one by the sampler's seed; `why_not`: why they are computed one by one
    nevertheless, in words, "" where they need not be."""

    waiting: int
    why_not: str


def offers(prompt: Prompt, waiting: list[tuple]) -> dict[str, Offer]:
    """By node, for samplers for which anything waits and that have several devices."""
    found = {}
    for node, one in prompt.items():
        if one["class_type"] != SAMPLER or not (others := alike(prompt, node, waiting)):
            continue
        if _device_count(prompt, node) > 1:
            found[node] = Offer(len(others), why_alone(one["inputs"]))
    return found


def _device_count(prompt: Prompt, node: str) -> int:
    """0 where only a run can tell, or the settings name none."""
    try:
        settings = settings_of(prompt, _strategy(prompt, node)) or default_settings()
        return len(resolve_devices(settings.devices))
    except ParallelError:
        return 0


def _strategy(prompt: Prompt, node: str) -> object:
    """The strategy's link: the sampler's own, else that of the node that its model comes from."""
    seen: set[str] = set()
    while node in prompt and node not in seen:
        seen.add(node)
        inputs = prompt[node]["inputs"]
        if "strategy" in inputs:
            return inputs["strategy"]
        link = inputs.get("parallel_model", inputs.get("model"))
        node = str(link[0]) if isinstance(link, list) and link else ""
    return None
