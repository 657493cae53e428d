"""Which waiting prompts ask a sampler for what the running one asks for, save the seed, and why some go alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..preload.tail import Prompt, needed

SAMPLER = "ParallelSampler"
_LOOKED_AT = 64  # prompts of a queue; more than there are devices
# Samplers that draw no noise of their own and compute each row of a batch as if it were alone. The others draw for the
# whole batch from one seed, or, dpm_adaptive, choose their steps by all of it; ddim draws anew under a mask.
ROW_BY_ROW = frozenset(
    (
        *("euler", "euler_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0", "dpm_2", "lms"),
        *("dpmpp_2m", "dpmpp_2m_cfg_pp", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp"),
        *("gradient_estimation", "gradient_estimation_cfg_pp", "uni_pc", "uni_pc_bh2"),
    )
)
# What a prompt's conditioning may carry: numbers that go to each row as they are, whatever the batch and the seed.
_PLAIN = frozenset(
    (
        *("pooled_output", "guidance", "prompt_type", "attention_mask", "frame_rate"),
        *("width", "height", "crop_w", "crop_h", "target_width", "target_height", "aesthetic_score"),
        *("reference_latents", "reference_latents_method", "concat_latent_image", "concat_mask"),
        *("t5xxl_ids", "t5xxl_weights", "conditioning_llama3", "conditioning_byt5small"),
    )
)


@dataclass(frozen=True)
class Waiting:
    """A prompt in ComfyUI's queue, and the seed that it has for the sampler."""

    prompt_id: str
    seed: int


def alike(prompt: Prompt, node: str, waiting: Iterable[tuple], passed: Collection[str] = ()) -> list[Waiting]:
    """Of the waiting items of ComfyUI's queue those that come next and ask `node` for what `prompt` asks, each with a
    seed of its own. Ends at the first that asks for something else, so that none is overtaken, and after 64.

    The prompts named in `passed`, and those whose seed was there already, are left out.
    """
    wanted = _branch(prompt, node)
    seeds = {_seed(prompt, node)}
    found: list[Waiting] = []
    if None in seeds:
        return found
    items = sorted(waiting, key=lambda item: item[:2])
    for _, prompt_id, other, _, outputs, *_ in itertools.islice(items, _LOOKED_AT):
        seed = _seed(other, node)
        if seed is None or node not in needed(other, outputs) or _branch(other, node) != wanted:
            break
        if seed not in seeds and prompt_id not in passed:
            found.append(Waiting(prompt_id, seed))
        seeds.add(seed)
    return found


def why_alone(inputs: Mapping[str, Any]) -> str:
    """Why a sampler with these inputs computes one prompt at a time, in a user's words; "" where it need not."""
    name = inputs.get("sampler_name")
    if isinstance(name, str) and name not in ROW_BY_ROW:
        return f"the sampler {name} gives an image of a batch otherwise than alone"
    if inputs.get("step_cache", "off") != "off":
        return "a step cache decides for a whole batch"
    return ""


def why_not_rows(conditioning: Sequence[Sequence[Any]]) -> str:
    """Why a row of a batch would get something else of this CONDITIONING than an image alone, in a user's words; ""
    where it would not."""
    for embedding, options in conditioning:
        carried = {key: value for key, value in options.items() if value is not None}
        if unknown := sorted(set(carried) - _PLAIN):
            return f"a prompt carries {', '.join(unknown)}"
        if not all(map(_is_for_each, (embedding, *carried.values()))):
            return "a prompt is a batch itself"
    return ""


def _is_for_each(value: Any) -> bool:
    """Whether each row of a batch gets all of it: no tensor in it has rows of its own."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_for_each, value))
    shape = getattr(value, "shape", None)
    if shape is None:
        return value is None or isinstance(value, (bool, int, float, str))
    return len(shape) > 0 and shape[0] == 1


def _seed(prompt: Prompt, node: str) -> int | None:
    """None where the node is no sampler of ours, or another node gives the seed."""
    found = prompt.get(node)
    if found is None or found["class_type"] != SAMPLER:
        return None
    seed = found["inputs"].get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _branch(prompt: Prompt, node: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """All that the node's result comes from, save its seed."""
    return {
        name: (
            prompt[name]["class_type"],
            {k: v for k, v in prompt[name]["inputs"].items() if (name, k) != (node, "seed")},
        )
        for name in needed(prompt, [node])
    }
