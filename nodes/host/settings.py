"""The pack's settings as a person set them in ComfyUI's Settings, checked: an invalid value is replaced by its default.
A change counts from the next use on.

With --multi-user only the settings of the user `default` count. All users share the devices and the ranks, so no user
may stop or reach them for the others. The person who runs the machine writes that file.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.errors import DeviceError, StrategyError
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.wire.strict_json import shown

log = logging.getLogger(__name__)
_lock = threading.Lock()

PREFIX = "parallel_sampling."  # begins the names of the pack's entries in ComfyUI's file
MOST_BYTES = 4 * 1024 * 1024  # the largest settings file that is read
MOST_MINUTES = 7 * 24 * 60
MOST_PRICE = 1_000_000  # of a GPU-hour, in any currency


Value = str | bool | float

# web/settings.js offers the same settings; tests/nodes/test_user_settings.py checks that both agree.
DEFAULTS: dict[str, Value] = {
    "default_devices": "all",
    "sleep_after_minutes": 0.0,
    "stop_after_minutes": 0.0,
    "start_at_launch": False,
    "allow_approximate": True,
    "try_strategies": True,
    "make_encoders_parallel": False,  # read only by the page
    "preload_next": True,
    "metrics": False,
    "price_per_gpu_hour": 0.0,
}


def _problem(name: str, value: Any) -> str | None:
    """Returns in words what is wrong with the value of a setting; None if it is valid."""
    default = DEFAULTS[name]
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "it must be true or false"
    if isinstance(default, float):
        most, words = MOST_MINUTES, f"a number of minutes from 0 (never) to {MOST_MINUTES}"
        if name == "price_per_gpu_hour":
            most, words = MOST_PRICE, f"a number from 0 (none) to {MOST_PRICE:,d}, in your currency"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Compared as it is: a huge int cannot become a float.
        return None if is_number and 0 <= value <= most else f"it must be {words}"
    if not isinstance(value, str):
        return "it is no text"
    try:
        resolve_devices(value)
    except DeviceError as error:
        return str(error)
    return None


def check_settings(found: Mapping[str, object]) -> tuple[dict[str, Value], list[str]]:
    """Returns (every setting by name, what was wrong in words) from the entries of ComfyUI's file."""
    values: dict[str, Value] = {}
    problems = []
    for name, default in DEFAULTS.items():
        value: Any = found.get(PREFIX + name, default)
        if (problem := _problem(name, value)) is not None:
            problems.append(f"the setting {name} is {shown(value)}: {problem}; {_in_words(default)} counts")
            value = default
        values[name] = float(value) if isinstance(default, float) else value
    return values, problems


def _in_words(default: Value) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else default


def read_settings(path: Path) -> tuple[Mapping[str, Value], tuple[str, ...]]:
    """Returns (every setting by name, what is wrong in words) from ComfyUI's file: the defaults if it is missing or
    damaged. Reads it again only when it has changed, and then logs each problem once. Thread-safe."""
    try:
        status = path.stat()
    except OSError:
        return DEFAULTS, ()
    with _lock:
        return _read(path, (status.st_mtime_ns, status.st_size, status.st_ino))


@functools.lru_cache(maxsize=1)
def _read(path: Path, stamp: tuple[int, int, int]) -> tuple[Mapping[str, Value], tuple[str, ...]]:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        found = json.loads(text) if len(text) <= MOST_BYTES else None
        values, problems = check_settings(found if isinstance(found, dict) else {})
        if not isinstance(found, dict):
            problems = ["ComfyUI's settings are not what they should be; the defaults count"]
    except (OSError, ValueError, RecursionError) as error:
        values = DEFAULTS
        problems = [f"ComfyUI's settings cannot be read ({type(error).__name__}); the defaults count"]
    for problem in problems:
        log.warning("parallel sampling: %s", problem)
    return values, tuple(problems)


def setting(name: str) -> Value:
    """Returns a setting's value, or its default if it is missing or invalid. Raises KeyError for an unknown name."""
    return read_settings(_path())[0][name]


def settings_problems() -> tuple[str, ...]:
    """Returns what is wrong with the settings that a person set, in words."""
    return read_settings(_path())[1]


def _path() -> Path:
    import folder_paths  # ComfyUI's; to check settings needs none

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


def fingerprint(cls: type, **inputs: object) -> tuple[Value, ...]:
    """Returns a node's `fingerprint_inputs`: the settings that change what loaders give. When it changes, ComfyUI runs
    the node again instead of using cached outputs."""
    return setting("default_devices"), setting("allow_approximate")
