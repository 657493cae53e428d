"""The report on this ComfyUI for a load balancer: queue length, state of the ranks, and if it takes prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..sidecar.group.lease import State
from ..sidecar.status import GroupStatus
from .gauges import Gauge

FOR = ("prompts", "pages")  # what HAProxy wants to send: prompts, or everything else


@dataclass(frozen=True)
class LoadReport:
    """The load of this ComfyUI. `waiting`: prompts in ComfyUI's queue, with the running one; `gauges`: readings by
    device; `draining`: True if an operator wants it empty."""

    waiting: int
    groups: tuple[GroupStatus, ...]
    gauges: Mapping[str, Gauge]
    draining: bool

    @property
    def refusal(self) -> str:
        """The reason why it takes no prompts, in one word; "" if it takes them."""
        if self.draining:
            return "draining"
        broken = any(group.state == State.BROKEN.value for group in self.groups)
        return "broken" if broken else ""

    @property
    def weight(self) -> int:
        """The weight for load balancing, in percent of that of an idle ComfyUI; 0 if it takes no prompts.

        It depends on the queue alone: little free memory may mean that the model is already loaded. It is proportional,
        because all front doors read it at once: many prompts arrive before the next read.
        """
        return 0 if self.refusal else max(1, round(100 / (1 + self.waiting)))

    def agent_line(self, requested: str) -> str:
        """Returns the answer to HAProxy's agent-check (its manual, 5.2). `requested`: one of FOR."""
        if requested == "prompts" and self.refusal:
            return f"down #{self.refusal}"
        return f"up {self.weight}%"  # for pages, 0 % still serves those who are connected already

    def as_json(self) -> dict[str, object]:
        """Returns the report for people and programs."""
        return {
            "takes_prompts": not self.refusal,
            "refusal": self.refusal,
            "waiting": self.waiting,
            "groups": [{"devices": list(group.devices), "state": group.state} for group in self.groups],
            "free_bytes": {device: gauge.free_bytes for device, gauge in self.gauges.items()},
        }
