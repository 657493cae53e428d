"""Nodes whose code keeps something from one sampling to the next, or follows a sampler's steps."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable

import comfy.sample
import numpy
import torch
from torch import Tensor

from .node import node


class Memory:
    """An object in which a patch keeps what it has seen."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.bank: dict[tuple[str, int], Tensor] = {}


def _attribute() -> Callable[[Tensor], Tensor | float]:
    memory = Memory()

    def step(seen: Tensor) -> Tensor | float:
        memory.total = memory.total + seen
        return memory.total

    return step


def _closure() -> Callable[[Tensor], Tensor | float]:
    total: Tensor | float = 0.0

    def step(seen: Tensor) -> Tensor | float:
        nonlocal total
        total = total + float(seen)
        return total

    return step


def _bank() -> Callable[[Tensor], Tensor | float]:
    memory = Memory()

    def step(seen: Tensor) -> Tensor | float:
        memory.bank["mean", len(memory.bank)] = seen
        return sum(memory.bank.values())

    return step


def _list(seen: list[Tensor], latest: Tensor) -> Tensor | float:
    seen.append(latest)
    return sum(seen)


def _in_place(total: Tensor, seen: Tensor) -> Tensor | float:
    return total.add_(seen).clone()


def _drawn(generator: torch.Generator, seen: Tensor) -> Tensor | float:
    return seen + torch.randn(1, generator=generator)


def _function() -> Callable[[Tensor], Tensor | float]:
    def step(seen: Tensor) -> Tensor | float:
        step.calls += 1
        return seen * step.calls

    step.calls = 0
    return step


def _random_numbers(seen: Tensor) -> Tensor | float:
    return seen + torch.randn(1) + random.random() + numpy.random.rand()


total: Tensor | float = 0.0
BANK: dict[str, list[Tensor]] = {"seen": []}
MEMORY = Memory()


def _variable() -> Callable[[Tensor], Tensor | float]:
    def step(seen: Tensor) -> Tensor | float:
        global total
        total = total + seen
        return total

    global total
    total = 0.0
    return step


def _variables_dict() -> Callable[[Tensor], Tensor | float]:
    BANK["seen"].clear()
    return lambda seen: _list(BANK["seen"], seen)


def _variables_object() -> Callable[[Tensor], Tensor | float]:
    def step(seen: Tensor) -> Tensor | float:
        MEMORY.total = MEMORY.total + seen
        return MEMORY.total

    MEMORY.total = 0.0
    return step


def _lock() -> Callable[[Tensor], Tensor | float]:
    memory = Memory()

    def step(seen: Tensor) -> Tensor | float:
        memory.lock = threading.Lock()
        return seen

    return step


PLACES: dict[str, Callable[[], Callable[[Tensor], Tensor | float]]] = {
    "an attribute": _attribute,
    "a closure": _closure,
    "a dict by call": _bank,
    "a list": lambda: functools.partial(_list, []),
    "a tensor written in place": lambda: functools.partial(_in_place, torch.zeros(())),
    "a random generator": lambda: functools.partial(_drawn, torch.Generator().manual_seed(3)),
    "an attribute of a function": _function,
    "the process's random generators": lambda: _random_numbers,
    "a variable": _variable,
    "a dict in a variable": _variables_dict,
    "an object in a variable": _variables_object,
    "a lock": _lock,
}


@node("TestMemory", model="MODEL", place="STRING", label="STRING")
def memory(model, place, label):
    """Shifts the model's outputs by what it has seen in all calls so far. `place`: where it keeps that; `label`:
    another one for nodes that must not share it, as ComfyUI runs only one of two nodes with the same inputs."""
    model, step = model.clone(), PLACES[place]()

    def wrapper(apply_model, given):
        answer = apply_model(given["input"], given["timestep"], **given["c"])
        return answer + 0.3 * step(answer.mean())

    model.set_model_unet_function_wrapper(wrapper)
    return model


def _written(owner: torch.nn.Module, name: str, seen: Tensor) -> Tensor | float:
    setattr(owner, name, getattr(owner, name) + seen)
    return getattr(owner, name)


def _filled(owner: torch.nn.Module, name: str, seen: Tensor) -> Tensor | float:
    return _list(getattr(owner, name), seen)


def _removed(owner: torch.nn.Module, name: str, seen: Tensor) -> Tensor | float:
    return seen if vars(owner).pop(name, None) is None else -seen


# (the value that the node gives to an attribute of the network, a function that changes it in each call)
ATTRIBUTES = {
    "a number": (lambda: 0.0, _written),
    "a list": (list, _filled),
    "an attribute that is removed": (lambda: 1.0, _removed),
}


@node("TestNetworkMemory", model="MODEL", attribute="STRING", block="BOOLEAN", label="STRING")
def network_memory(model, attribute, block, label):
    """Like TestMemory, but it keeps what it has seen in an attribute of the network, or of its first block."""
    model, name = model.clone(), f"seen_{label}"
    value, step = ATTRIBUTES[attribute]

    def owner_in(base):
        network = base.diffusion_model
        return network.double_blocks[0] if block else network

    def wrapper(apply_model, given):
        answer = apply_model(given["input"], given["timestep"], **given["c"])
        return answer + 0.3 * step(owner_in(apply_model.__self__), name, answer.mean())

    setattr(owner_in(model.model), name, value())
    model.set_model_unet_function_wrapper(wrapper)
    return model


@node("TestSeeds", "LATENT", latent="LATENT", model="MODEL")
def seeds(latent, model):
    """Seeds the process's random generators, after the model is loaded and before the latent is sampled."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    return latent


@node(
    "TestFollowingSampler",
    "LATENT",
    model="MODEL",
    positive="CONDITIONING",
    negative="CONDITIONING",
    latent="LATENT",
)
def following_sampler(model, positive, negative, latent):
    """Returns what a sampler's callback gets in each step: the denoised latents, then the latents."""
    samples, denoised, latents = latent["samples"], [], []

    def follow(step, x0, x, steps):
        assert (step, steps) == (len(latents), 3)
        denoised.append(x0.cpu().clone())
        latents.append(x.cpu().clone())

    noise = comfy.sample.prepare_noise(samples, 7)
    prompts = (positive, negative, samples)
    comfy.sample.sample(model, noise, 3, 2.0, "euler", "normal", *prompts, callback=follow, seed=7)
    return {"samples": torch.cat([*denoised, *latents])}
