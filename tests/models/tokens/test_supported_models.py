"""Every model that ComfyUI knows has a state in docs/models.md, and that page is its script's current output."""

from pathlib import Path

import pytest

from comfy_modules import import_comfyui_here
from comfyui_source import comfyui_version
from list_models import PAGE, configurations, page
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import TOKEN_MODES

pytestmark = pytest.mark.xdist_group("supported_models")  # one worker builds them


@pytest.fixture(scope="module")
def root():
    return Path(import_comfyui_here().root)


@pytest.fixture(scope="module")
def found(root):
    return configurations()


def test_every_configuration_has_a_state_and_says_its_module(found):
    import comfy.supported_models

    assert [one.name for one in found] == [one.__name__ for one in comfy.supported_models.models]
    assert {one.state for one in found} <= set(TOKEN_MODES)
    assert [one.name for one in found if not one.module] == []


def test_every_entry_of_the_table_serves_a_configuration(root, found):
    here = {name for name, entry in TABLE.items() if (root / entry.source).is_file()}
    assert here and here <= {one.module for one in found}


def test_building_is_only_stopped_while_it_is_looked_at(found):
    from comfy.model_base import BaseModel

    assert BaseModel.__init__.__module__ == "comfy.model_base"


def test_the_page_is_what_the_script_gives(root, found):
    version = comfyui_version(root)
    if f"ComfyUI {version}." not in PAGE.read_text():
        pytest.skip(f"docs/models.md is of another ComfyUI than this one, {version}")
    assert PAGE.read_text() == page(root, found), "run scripts/list_models.py"
