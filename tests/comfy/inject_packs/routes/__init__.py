"""A test-only pack that registers routes, starts a thread and opens a socket when it is imported."""

from __future__ import annotations

import socket
import threading
import time

import torch
from aiohttp import web
from server import PromptServer

_LISTENER = socket.create_server(("127.0.0.1", 0))
_TICKS = {"count": 0}


@PromptServer.instance.routes.get("/parallel_test_routes/ticks")
async def ticks(request):
    return web.json_response(_TICKS)


def _tick() -> None:
    while True:
        _TICKS["count"] += 1
        time.sleep(0.2)


# In a rank the thread is not a daemon, so it keeps the interpreter from exiting.
threading.Thread(target=_tick, daemon=not torch.distributed.is_initialized()).start()


def halved(apply, found):
    answer = apply(found["input"], found["timestep"], **found["c"])
    PromptServer.instance.send_sync("parallel_test_routes", {"sigma": float(found["timestep"][0])})
    return answer * 0.5


class TestRoutes:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "apply", "parallel/testing"

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestRoutes": TestRoutes}
