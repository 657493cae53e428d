"""What calls of one run leave for the next ones in a rank: keys and values of references, or of earlier frames.

ComfyUI's own objects for that live in its process, and every rank would have to be sent them back and forth. So each
rank keeps its own, whole, of all rows: every call of such a run is made by all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RequestError

REFERENCES, FRAMES = "references", "frames"  # what a run may leave


class ReferenceCache:
    """Keys and values of reference images by block, from the first call of a run on; later ones leave the references'
    tokens out and attend to these."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: Mapping[str, Any], **other: Any
    ) -> dict[str, Tensor]:
        """In each block's attention: q, k, v [B, heads, tokens, width], the references' tokens last."""
        tokens = sum(extra_options.get("reference_image_num_tokens", ()))
        if not tokens:
            return {}
        block = (extra_options["block_type"], extra_options["block_index"])
        if block in self._kept:
            keys, values = (_of_batch(kept, len(k)) for kept in self._kept[block])
            return {"q": q, "k": torch.cat((k, keys), dim=2), "v": torch.cat((v, values), dim=2)}
        self._kept[block] = (k[:, :, -tokens:].clone(), v[:, :, -tokens:].clone())
        return {"q": q, "k": k, "v": v}

    def after_input(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Before the first block: without the references' tokens once their keys and values are kept."""
        tokens = sum(inputs["transformer_options"].get("reference_image_num_tokens", ()))
        if self._kept and tokens:
            inputs["img"] = inputs["img"][:, :-tokens]
        return inputs


class RunMemory:
    """Of one run at a time, which the next one takes the place of."""

    def __init__(self) -> None:
        self._run: int | None = None
        self._calls = 0
        self._value: Any = None

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def enter(self, run: Mapping[str, Any], network: nn.Module) -> Any:
        """At the start of call number `call` of the run `number`: what the calls before it left. Raises RequestError
        where a call is missing or was made before, since what it left cannot be made up for."""
        if run["call"] == 0:
            self._run, self._calls = run["number"], 0
            self._value = ReferenceCache() if run["kind"] == REFERENCES else _frames(run, network)
        if (run["number"], run["call"]) != (self._run, self._calls):
            raise RequestError(
                "The devices no longer have what earlier steps of this run left for later ones (its references or "
                "frames): they ran out of memory or started again meanwhile. Run the prompt again."
            )
        self._calls += 1
        if run["kind"] == REFERENCES:
            return self._value
        for cache, end in zip(self._value["kv_caches"], run["ends"], strict=True):
            cache["end"] = end
        return {"ar_state": {"start_frame": run["start_frame"], **self._value}}


def _frames(run: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Empty caches as the model's own class makes them."""
    weight = next(network.parameters())
    dtype = getattr(torch, run["dtype"])
    return {
        "kv_caches": network.init_kv_caches(run["rows"], run["tokens"], weight.device, dtype),
        "crossattn_caches": network.init_crossattn_caches(run["rows"], weight.device, dtype),
    }


def _of_batch(kept: Tensor, rows: int) -> Tensor:
    """With as many rows, repeated in turn."""
    return kept if len(kept) == rows else kept.repeat(-(-rows // len(kept)), 1, 1, 1)[:rows]
