"""Flux.1-dev and a job for it, for tests of what the planner expects."""

from parallel_backend.strategy import ModelShape

SHAPE = ModelShape(24, 57, "flux1-dev.safetensors")
REQUEST = {"width": 1024, "height": 1024, "text": 512, "batch": 1, "has_cfg": False, "steps": 28}
