"""The pack's settings as a person set them in ComfyUI's Settings; changes count from the next use on.

With --multi-user they are those of the user `default` alone: the devices and the ranks are everybody's, so none of the
users may stop or reach them for the others. Whoever runs the machine writes that file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import folder_paths

from ...parallel_backend.errors import StrategyError
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from .user_settings import SettingsFile

_file = SettingsFile()


def setting(name: str) -> str | bool | float:
    """Its value, or the default for one that is missing or makes no sense. Raises KeyError for an unknown name."""
    return _file.read(_path())[name]


def settings_problems() -> tuple[str, ...]:
    """The faults of what a person set, in words."""
    _file.read(_path())
    return _file.problems


def _path() -> Path:
    return Path(folder_paths.get_user_directory(), "default", "comfy.settings.json")


def default_settings() -> StrategySettings:
    """The settings of a Strategy Selector where none is connected."""
    return StrategySettings(devices=setting("default_devices"))


def permitted(
    settings: StrategySettings,
    steps: int,
    *,
    step_cache: bool = False,
    computing: ComputeOptions = DEFAULT_COMPUTE,
) -> StrategySettings:
    """`settings` within what the settings allow. Where approximate ways are not, `auto` has none to choose from, and
    what a person asked for by hand is refused with StrategyError, since another picture than was asked for would be no
    answer either.

    `steps`: of the request; `step_cache`: one was asked for; `computing`: what else was.
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
    """In the user's currency; 0 where none is set."""
    return float(setting("price_per_gpu_hour"))


def fingerprint(cls: type, **inputs: object) -> tuple[str | bool | float, ...]:
    """A node's `fingerprint_inputs`: of the settings that decide what loaders give. When it changes, ComfyUI's cached
    outputs do not count."""
    return setting("default_devices"), setting("allow_approximate")
