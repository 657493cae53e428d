"""The programs that send prompts: each waits for its picture, compares its latent and sends the next one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
import torch
from safetensors.torch import load

from .farm import Farm
from .mix import Order, Picture, graph_of, saved_latent

DEADLINE = 600.0  # s for one prompt, on a busy machine
_POLL = 0.2  # s
EXACT = 1e-5  # relative to the largest value


@dataclass
class Tally:
    """The outcome of the prompts. `seconds`: from sending to end, of each done; `busy`: seconds of running prompts."""

    seconds: list[float] = field(default_factory=list)
    busy: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[Picture] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wall: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)  # HTTP failures, and what became of lost prompts


async def run_all(
    farm: Farm,
    orders: list[Order],
    known: Mapping[Picture, torch.Tensor],
    ranks: int,
    programs: int,
    passed: Callable[[int], None] = lambda count: None,
) -> Tally:
    """Sends every order, with `programs` programs at a time. `passed`: called with the number that have ended."""
    tally, waiting = Tally(), iter(orders)
    began = time.monotonic()
    await asyncio.gather(*(_program(farm, waiting, known, ranks, tally, passed) for _ in range(programs)))
    tally.wall = time.monotonic() - began
    return tally


async def _program(
    farm: Farm,
    orders: Iterator[Order],
    known: Mapping[Picture, torch.Tensor],
    ranks: int,
    tally: Tally,
    passed: Callable[[int], None],
) -> None:
    for order in orders:
        async with farm.client() as client:
            sent = time.time()  # the clock of ComfyUI's history
            prompt_id = await _send(client, order, ranks)
            if order.cancelled:
                await _cancel(client, prompt_id)
            entry = await _wait(client, prompt_id, tally.answers)
            if entry is None and not order.cancelled:
                tally.answers[await _whereabouts(farm, client, prompt_id)] += 1
            await _judge(client, order, prompt_id, entry, sent, known, tally)
            async with client.post("/history", json={"delete": [prompt_id]}):
                pass  # as a program does once it has its picture; ComfyUI keeps thousands of entries
        passed(tally.ends.total())


async def _whereabouts(farm: Farm, client: aiohttp.ClientSession, prompt_id: str) -> str:
    """Returns which ComfyUI knows a lost prompt, and which one the session asked."""
    asked = ",".join(f"{cookie.key}={cookie.value}" for cookie in client.cookie_jar) or "anybody"
    for name, server in farm.servers.items():
        async with aiohttp.ClientSession(server.url) as direct:
            if prompt_id in (await _look(direct, f"/history/{prompt_id}", Counter()) or {}):
                return f"known to {name} where {asked[:9]} was asked"
    return f"known to nobody where {asked[:9]} was asked"


async def _send(client: aiohttp.ClientSession, order: Order, ranks: int) -> str:
    body = {"prompt": graph_of(order.picture, order.number, ranks), "prompt_id": str(uuid.uuid4())}
    while True:
        async with client.post("/prompt", json=body) as answer:
            if answer.status == 200:
                return (await answer.json())["prompt_id"]
            if answer.status != 429:
                raise RuntimeError(f"a prompt was refused with {answer.status}: {await answer.text()}")
            await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))


async def _cancel(client: aiohttp.ClientSession, prompt_id: str) -> None:
    """Cancels the prompt if it waits or runs; a prompt that has ended does not change."""
    await asyncio.sleep(_POLL)
    async with client.post("/queue", json={"delete": [prompt_id]}):
        pass
    async with client.post("/interrupt", json={"prompt_id": prompt_id}):
        pass


async def _wait(client: aiohttp.ClientSession, prompt_id: str, answers: Counter[str]) -> dict | None:
    """Returns the prompt's history entry once it has ended, or None if its ComfyUI lost it or DEADLINE has passed.
    `answers`: counts answers other than 200. No ComfyUI ends during the test, so a busy one is asked again."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        queue = await _look(client, "/queue", answers)
        history = await _look(client, f"/history/{prompt_id}", answers)
        if queue is None or history is None:
            await asyncio.sleep(_POLL)
            continue
        if prompt_id in history:
            return history[prompt_id]
        if prompt_id not in {item[1] for items in queue.values() for item in items}:
            return None  # the queue was read first: had the prompt ended since, the history would have it
        await asyncio.sleep(_POLL)
    return None


async def _look(client: aiohttp.ClientSession, path: str, answers: Counter[str]) -> dict | None:
    async with client.get(path) as answer:
        if answer.status == 200:
            return await answer.json()
        answers[f"{answer.status} for {path.split('/')[1]}"] += 1
        return None


async def _judge(
    client: aiohttp.ClientSession,
    order: Order,
    prompt_id: str,
    entry: dict | None,
    sent: float,
    known: Mapping[Picture, torch.Tensor],
    tally: Tally,
) -> None:
    if entry is None:
        tally.ends["cancelled" if order.cancelled else "lost"] += 1
        if not order.cancelled:
            tally.lost.append(prompt_id)
        return
    at = {kind: data["timestamp"] / 1e3 for kind, data in entry["status"]["messages"]}
    ended = max(at.values())
    tally.busy += ended - at["execution_start"]
    if "execution_interrupted" in at and order.cancelled:
        tally.ends["cancelled"] += 1
        return
    if "execution_success" not in at:
        tally.ends["failed"] += 1
        tally.lost.append(prompt_id)
        return
    tally.ends["done"] += 1
    tally.seconds.append(ended - sent)
    if order.picture in known and differs(await latent_of(client, entry), known[order.picture]):
        tally.wrong.append(order.picture)


async def latent_of(client: aiohttp.ClientSession, entry: dict) -> torch.Tensor:
    """Returns the latent that a prompt saved."""
    async with client.get("/view", params=saved_latent(entry["outputs"])) as answer:
        return load(await answer.read())["latent_tensor"]


def differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns True if the latents differ by more than the order of a sum explains."""
    if found.shape != expected.shape:
        return True
    return not bool((found - expected).abs().max() <= EXACT * expected.abs().max())


async def references(farm: Farm, pictures: tuple[Picture, ...], ranks: int) -> dict[Picture, torch.Tensor]:
    """Returns the latent of each picture, computed by the first ComfyUI alone on `ranks` devices."""
    found = {}
    async with aiohttp.ClientSession(next(iter(farm.servers.values())).url) as client:
        for number, picture in enumerate(pictures):
            # Numbers that no order has. Otherwise ComfyUI would answer an order from its cache.
            prompt_id = await _send(client, Order(-1 - number, picture, cancelled=False), ranks)
            entry = await _wait(client, prompt_id, Counter())
            if entry is None or not entry["status"]["completed"]:
                raise RuntimeError(f"no reference for {picture}: {entry and entry['status']}")
            found[picture] = await latent_of(client, entry)
    return found
