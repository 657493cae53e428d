"""The search for the node of the prompt that put into a job an object that cannot be sent."""

from __future__ import annotations

import os

from comfy.model_patcher import ModelPatcher

import nodes

from ...parallel_backend.errors import RequestError
from ...parallel_backend.job.pickling import PATCHER_STATE, CannotBeSent, Known, can_be_sent
from ..host.prompt_graph import Prompt, needed
from ..host.prompt_links import current_node, models_before, title_of
from .model import JobPatcher


def with_culprit(error: CannotBeSent, patcher: JobPatcher, known: Known) -> RequestError:
    """Returns the refusal with the title of the node that caused it, or `error` itself if that is unknown. It is the
    node of the first MODEL that cannot be sent, else one from the pack that the object's code is in."""
    running = current_node()
    if running is None:
        return error
    prompt, node = running
    found = _first_with_it(prompt, patcher, known)
    titles = [title_of(prompt, found)] if found in prompt else _of_its_code(prompt, node, error.modules)
    if not titles:
        return error
    names = " or ".join(titles)
    return RequestError(
        f"The devices cannot be given what {names} has put into this job: {error.problem}. It is held by "
        f"{error.held_by}. Take that node out, or connect its MODEL without Parallel Model."
    )


def _first_with_it(prompt: Prompt, patcher: JobPatcher, known: Known) -> str:
    """Returns the id of the node that gives the first MODEL which cannot be sent; "" if that is unknown."""
    behind = [one for one in _with_parents(patcher) if isinstance(one, JobPatcher)]
    found = next((one for one in behind if not _is_sendable(one, known)), None)
    if found is not behind[0] or found is None:
        return "" if found is None else found.made_by or ""
    before = _with_parents(found.made_from())
    path = models_before(prompt, found.made_by or "")
    bad = next((number for number, one in enumerate(before) if not _is_sendable(one, known)), None)
    # Usually each node clones the MODEL once, so that patchers and nodes correspond.
    return path[bad] if bad is not None and len(path) == len(before) else ""


def _with_parents(patcher: ModelPatcher | None) -> list[ModelPatcher]:
    found: list[ModelPatcher] = []
    while patcher is not None:
        found.insert(0, patcher)
        patcher = patcher.parent
    return found


def _is_sendable(patcher: ModelPatcher, known: Known) -> bool:
    state = {key: value for key, value in vars(patcher).items() if key not in PATCHER_STATE}
    return can_be_sent(state, known, ModelPatcher)


def _of_its_code(prompt: Prompt, node: str, modules: tuple[str, ...]) -> list[str]:
    """Returns the titles of the nodes before `node` whose class lies in the first of `modules` that has such nodes, or
    in its pack."""
    before = {one: _module_of(prompt, one) for one in needed(prompt, [node]) if one != node}
    for module in filter(_is_foreign, modules):
        same = [one for one, other in before.items() if _is_one_pack(module, other)]
        if same:
            return [title_of(prompt, one) for one in same]
    return []


def _is_foreign(module: str) -> bool:
    return bool(module) and not module.startswith(__name__.rsplit(".nodes.", 1)[0])


def _module_of(prompt: Prompt, node: str) -> str:
    kind = nodes.NODE_CLASS_MAPPINGS.get(str(prompt[node].get("class_type", "")))
    return str(getattr(kind, "__module__", ""))


def _is_one_pack(one: str, other: str) -> bool:
    """Returns True if both are one module, or are in one pack: ComfyUI names a pack's modules by its path."""
    return one == other or (os.sep in one and _pack_of(one) == _pack_of(other))


def _pack_of(module: str) -> str:
    folder, _, name = module.rpartition(os.sep)
    return f"{folder}{os.sep}{name.partition('.')[0]}"
