"""API prompts for the parity tests: the same sampling once with stock nodes and once with the pack's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

ON_GPU = "PARALLEL_TEST_GPU"  # if set, ComfyUI computes on the GPU; its value has more arguments for ComfyUI
TEXT = {"tokens": 7, "width": 64, "pooled_width": 32, "batch": 1}
LATENT = {"batch": 1, "draw": -1, "batch_index": "", "noise_mask": False}
SAMPLING = {"seed": 7, "steps": 3, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
AXES = ("cfg", "pipefusion", "ring", "ulysses", "data", "tensor")
OURS, STOCK = "ours", "stock"


def devices_of(choice: dict) -> str:
    """Returns as many CPU devices as a strategy takes. `choice`: its degrees by axis, and other settings."""
    return f"cpu:{prod(value for name, value in choice.items() if name in AXES)}"


def node(class_type: str, **inputs) -> dict:
    return {"class_type": class_type, "inputs": inputs}


def inputs_of(info: dict) -> Iterator[tuple[str, str, dict, bool]]:
    """Yields (name, type, options, True if required) of each input of a node; combos have the type COMBO."""
    for part in ("required", "optional"):
        for name, entry in info["input"].get(part, {}).items():
            kind = entry[0] if isinstance(entry[0], str) else "COMBO"
            options = dict(entry[1]) if len(entry) > 1 else {}
            if kind == "COMBO" and not isinstance(entry[0], str):
                options["options"] = entry[0]
            yield name, kind, options, part == "required"


def devices_here(devices: str) -> str:
    """Returns `devices`. If they name CPU ranks and the tests compute on GPUs, returns as many GPUs."""
    if ON_GPU not in os.environ or not devices.startswith("cpu"):
        return devices
    if "," in devices:
        return devices.replace("cpu:", "")
    return ",".join(str(index) for index in range(int(devices.removeprefix("cpu:"))))


class Graph:
    """Builds one prompt; each method adds a node and returns its id or a link to its output."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict] = {}

    def add(self, class_type: str, **inputs) -> str:
        name = f"{class_type}{len(self.prompt)}"
        self.prompt[name] = node(class_type, **inputs)
        return name

    def text(self, draw: int, guidance: float = 3.5, **changes) -> list:
        return [self.add("TestConditioning", draw=draw, guidance=guidance, **{**TEXT, **changes}), 0]

    def latent(self, width: int = 16, height: int = 12, **changes) -> list:
        return [self.add("TestLatent", width=width, height=height, **LATENT | changes), 0]

    def request(self, **latent) -> tuple[list, list, list]:
        """Adds a positive prompt, a negative one and a latent."""
        return self.text(1), self.text(2), self.latent(**latent)

    def strategy(self, devices: str, engine: str = "auto", **settings) -> list:
        """Adds a StrategySelector. `settings`: degrees by axis, and optional inputs by name. Its mode is manual if
        there are settings other than device_shares."""
        inputs = {f"{axis}_degree": 1 for axis in ("cfg", "pipefusion", "ring", "ulysses", "data")}
        for name, value in settings.items():
            inputs[f"{name}_degree" if name in AXES else name] = value
        mode = "manual" if set(settings) - {"device_shares"} else "auto"
        devices = devices_here(devices)
        return [self.add("StrategySelector", mode=mode, devices=devices, engine=engine, **inputs), 0]

    def parallel_loader(self, unet: str, devices: str, **choice) -> str:
        """Adds a ParallelFluxLoader. `choice`: engine, and the settings of `strategy`."""
        strategy = self.strategy(devices, **choice)
        return self.add("ParallelFluxLoader", unet_name=unet, weight_dtype="auto", strategy=strategy)

    def model(self, kind: str, unet: str, devices: str = "cpu:2", **choice) -> list:
        """Adds a loader and returns its MODEL. `kind`: STOCK or OURS."""
        if kind == STOCK:
            return [self.add("UNETLoader", unet_name=unet, weight_dtype="default"), 0]
        return [self.parallel_loader(unet, devices, **choice), 1]

    def loaded_by(self, kind: str, unet: str, strategy: list | None = None) -> list:
        """Returns the PARALLEL_MODEL of a loader of the pack, or of Parallel Model behind a changed stock MODEL."""
        own = {} if strategy is None else {"strategy": strategy}
        if kind == "ParallelModel":
            shifts = {"max_shift": 1.15, "base_shift": 0.5, "width": 128, "height": 96}
            changed = self.add("ModelSamplingFlux", model=self.model(STOCK, unet), **shifts)
            return [self.add(kind, model=[changed, 0], **own), 1]
        if kind == "ParallelModelLoader":
            return [self.add(kind, model_name=unet, weight_dtype="default", **own), 1]
        return [self.add(kind, unet_name=unet, weight_dtype="auto", **own), 0]

    def ksampler(self, model: list, *links: list, **changes) -> list:
        """Adds a KSampler. `links`: the positive prompt, the negative one and the latent."""
        return self._sampler("KSampler", {"model": model}, *links, **changes)

    def parallel_sampler(self, loader: str | list, *links: list, **changes) -> list:
        """Adds a ParallelSampler. `loader`: a model output, or a node whose first output is the model."""
        model = loader if isinstance(loader, list) else [loader, 0]
        return self._sampler("ParallelSampler", {"parallel_model": model}, *links, **changes)

    def sampled_by(
        self, models: dict[str, list], request: tuple[list, list, list], **changes
    ) -> dict[str, list]:
        """Samples one request by each model; returns its latent. Only "Parallel Sampler" is not sampled by KSampler."""
        by = {name: self.ksampler for name in models} | {"Parallel Sampler": self.parallel_sampler}
        return {name: by[name](model, *request, **changes) for name, model in models.items()}

    def _sampler(
        self, class_type: str, inputs: dict, positive: list, negative: list, latent: list, **changes
    ) -> list:
        inputs = {**inputs, "positive": positive, "negative": negative, "latent_image": latent}
        return [self.add(class_type, **inputs, **SAMPLING | changes), 0]

    def custom_sampler(
        self, model: list, guider: str, sampler: str, latent: list, scheduler: str = "simple", steps: int = 3
    ) -> str:
        """Adds SamplerCustomAdvanced. `guider`, `sampler`: nodes of them, or a sampler's name."""
        if sampler not in self.prompt:
            sampler = self.add("KSamplerSelect", sampler_name=sampler)
        parts = {
            "noise": [self.add("RandomNoise", noise_seed=3), 0],
            "guider": [guider, 0],
            "sampler": [sampler, 0],
            "sigmas": [
                self.add("BasicScheduler", model=model, scheduler=scheduler, steps=steps, denoise=1.0), 0
            ],
        }  # fmt: skip
        return self.add("SamplerCustomAdvanced", latent_image=latent, **parts)

    def lora(self, model: list, name: str, strength: float = 0.8) -> list:
        return [self.add("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=strength), 0]

    def hooked(self, prompt: list, hook: list, **properties) -> list:
        properties = {"strength": 1.0, "set_cond_area": "default", "hooks": hook} | properties
        return [self.add("ConditioningSetProperties", cond_NEW=prompt, **properties), 0]

    def controlled(
        self, positive: list, negative: list, name: str, width: int = 128, height: int = 96, **settings
    ) -> tuple[list, list]:
        """Adds the ControlNet of a file to both prompts, for an image of one colour."""
        image = [self.add("EmptyImage", width=width, height=height, batch_size=1, color=0x804020), 0]
        loader = [self.add("ControlNetLoader", control_net_name=name), 0]
        wired = {"positive": positive, "negative": negative, "control_net": loader, "image": image}
        settings = {"strength": 0.7, "start_percent": 0.0, "end_percent": 1.0} | settings
        applied = self.add("ControlNetApplyAdvanced", **wired, **settings)
        return [applied, 0], [applied, 1]

    def combined(self, one: list, other: list) -> list:
        return [self.add("ConditioningCombine", conditioning_1=one, conditioning_2=other), 0]

    def save(self, value: list, path: str) -> str:
        return self.add("TestSave", value=value, path=path)
