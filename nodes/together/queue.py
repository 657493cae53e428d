"""ComfyUI's queue of prompts, looked at and never changed."""

from __future__ import annotations

from ..preload.tail import Prompt


def _items() -> tuple[list[tuple], list[tuple]]:
    """(those that run, those that wait), each (number, prompt id, prompt, extra data, outputs, …)."""
    from server import PromptServer  # imports ComfyUI's whole server: not wanted before it runs

    server = getattr(PromptServer, "instance", None)
    return ([], []) if server is None else server.prompt_queue.get_current_queue_volatile()


def running_prompt(prompt_id: str) -> Prompt | None:
    running, _ = _items()
    return next((item[2] for item in running if item[1] == prompt_id), None)


def waiting_prompts() -> list[tuple]:
    return _items()[1]


def queued_prompts() -> set[str]:
    """The ids of all that run or wait."""
    return {item[1] for items in _items() for item in items}


def first_and_waiting() -> tuple[tuple | None, list[tuple]]:
    """The item that runs, or waits first where none does; the others that wait."""
    running, waiting = _items()
    items = running[:1] + sorted(waiting, key=lambda item: item[:2])
    return (items[0], items[1:]) if items else (None, [])
