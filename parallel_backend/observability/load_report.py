"""What a load balancer learns of this ComfyUI: how much waits, what its ranks do, and whether it takes prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..sidecar.group.lease import State
from ..sidecar.status import GroupStatus
from .gauges import Gauge

FOR = ("prompts", "pages")  # what HAProxy would send: prompts, or everything else


@dataclass(frozen=True)
class LoadReport:
    """`waiting`: prompts in ComfyUI's queue, the one that runs included; `gauges`: of each device; `draining`: an
    operator wants it empty."""

    waiting: int
    groups: tuple[GroupStatus, ...]
    gauges: Mapping[str, Gauge]
    draining: bool

    @property
    def refusal(self) -> str:
        """Why it takes no prompts, in a word; "" where it does."""
        if self.draining:
            return "draining"
        broken = any(group.state == State.BROKEN.value for group in self.groups)
        return "broken" if broken else ""

    @property
    def weight(self) -> int:
        """Percent of a ComfyUI's prompts that has nothing to do; 0 where it takes none.

        By the queue alone: little free memory may mean that the model is there already. In proportion, and not only the
        shortest, because all front doors look at once, and between two looks many prompts come.
        """
        return 0 if self.refusal else max(1, round(100 / (1 + self.waiting)))

    def agent_line(self, requested: str) -> str:
        """The answer to an agent-check of HAProxy (its manual, 5.2), for one of FOR."""
        if requested == "prompts" and self.refusal:
            return f"down #{self.refusal}"
        return f"up {self.weight}%"  # of pages, at 0 %, those stay that are here already

    def as_json(self) -> dict[str, object]:
        """For people and programs."""
        return {
            "takes_prompts": not self.refusal,
            "refusal": self.refusal,
            "waiting": self.waiting,
            "groups": [{"devices": list(group.devices), "state": group.state} for group in self.groups],
            "free_bytes": {device: gauge.free_bytes for device, gauge in self.gauges.items()},
        }
