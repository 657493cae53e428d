"""The pack's settings as a person set them in ComfyUI's Settings. A change counts from the next use on.

With --multi-user only the settings of the user `default` count. All users share the devices and the ranks, so no user
may stop or reach them for the others. The person who runs the machine writes that file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import folder_paths

from ...parallel_backend.errors import StrategyError
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from .user_settings import read_settings


def setting(name: str) -> str | bool | float:
    """Returns a setting's value, or its default if it is missing or invalid. Raises KeyError for an unknown name."""
    return read_settings(_path())[0][name]


def settings_problems() -> tuple[str, ...]:
    """Returns what is wrong with the settings that a person set, in words."""
    return read_settings(_path())[1]


def _path() -> Path:
    return Path(folder_paths.get_user_directory(), "default", "comfy.settings.json")


def default_settings() -> StrategySettings:
    """Returns the strategy settings to use if no Strategy Selector is connected."""
    return StrategySettings(devices=setting("default_devices"))


def permitted(
    settings: StrategySettings,
    steps: int,
    *,
    step_cache: bool = False,
    computing: ComputeOptions = DEFAULT_COMPUTE,
) -> StrategySettings:
    """Returns `settings`, restricted to exact strategies if the setting allow_approximate is off: `auto` then has only
    those to choose from. Raises StrategyError for an approximate option set by hand: the exact picture would not be the
    one requested.

    `steps`: of the request; `step_cache`: True if one was requested; `computing`: the compute options requested.
    """
    if setting("allow_approximate"):
        return settings
    strategy = settings.strategy
    asked = []
    if settings.mode == "manual" and strategy.pipefusion_degree > 1 and strategy.warmup_steps < steps:
        asked.append(f"set pipefusion_degree to 1, or warmup_steps to {steps}, with which it is exact")
    if step_cache:
        asked.append("set step_cache to off, or take Parallel Step Cache out")
    asked += computing.approximate_inputs
    if asked:
        raise StrategyError(
            f"This is approximate, and the setting Allow approximate strategies (Settings, Parallel Sampling) is off: "
            f"{'; '.join(asked)}; or turn the setting on.",
            inputs=("pipefusion_degree", "warmup_steps"),
        )
    return replace(settings, approximation="never")


def price_per_gpu_hour() -> float:
    """Returns the price of a GPU-hour in the user's currency; 0 if none is set."""
    return float(setting("price_per_gpu_hour"))


def fingerprint(cls: type, **inputs: object) -> tuple[str | bool | float, ...]:
    """Returns a node's `fingerprint_inputs`: the settings that change what loaders give. When it changes, ComfyUI runs
    the node again instead of using cached outputs."""
    return setting("default_devices"), setting("allow_approximate")
