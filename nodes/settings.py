"""The pack's settings as a person set them in ComfyUI's Settings; changes count from the next use on.

With --multi-user they are those of the user `default` alone: the devices and the ranks are everybody's, so none of the
users may stop or reach them for the others. Whoever runs the machine writes that file.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..parallel_backend.user_settings import SettingsFile

_file = SettingsFile()


def setting(name: str) -> str | bool | float:
    """Its value, or the default for one that is missing or makes no sense. Raises KeyError for an unknown name."""
    return _file.read(Path(folder_paths.get_user_directory(), "default", "comfy.settings.json"))[name]
