"""The variables of packs' modules that a job's code names are found, and which of them nodes have set."""

from __future__ import annotations

import sys
import types

import pytest

from pack_nodes import module_fixture
from parallel_backend.job.restore import AS_IMPORTED, Replaced

pack_variables = module_fixture("nodes.job.pack_variables")
PACK = "/somewhere/custom_nodes/pack"
CODE = """


scale, unused, tables = 1.0, 1.0, {"deep": [{"a": 1}]}

class Settings:
    strength = 1.0
    def __init__(self): self.value = 1.0
    def total(self): return self.value + Settings.strength

settings = Settings()

def helper(): return tables["deep"][0]["a"]
def patch(): return scale * settings.total() + helper() + other.mode
"""
LATE = """
count, table = 0, {}

def step(): return count + len(table) + size()
def size(): return 1
"""


@pytest.fixture
def pack(monkeypatch, pack_variables) -> types.ModuleType:
    """A pack of two modules, right after its import."""
    modules = {name: types.ModuleType(name) for name in (PACK, f"{PACK}.other")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    main, other = modules.values()
    other.mode = 0
    main.other = other
    exec(CODE, vars(main))  # noqa: S102
    pack_variables.note_variables({PACK: (f"{PACK}/__init__.py", True)})
    return main


def _set(pack_variables, pack) -> list[tuple[str, str, str]]:
    variables = filter(pack_variables.was_set, pack_variables.variables_of([pack.patch]))
    return sorted((one.module.removeprefix(PACK), one.path, one.name) for one in variables)


def test_the_data_that_the_code_names_is_found_and_none_of_it_set_right_after_the_import(
    pack_variables, pack
):
    found = pack_variables.names_of(pack_variables.variables_of([pack.patch]))
    assert found == {
        *((PACK, "", name) for name in ("scale", "tables", "settings")),
        (PACK, "Settings", "strength"),
        (f"{PACK}.other", "", "mode"),
    }
    assert _set(pack_variables, pack) == []


def test_all_data_of_a_module_that_a_node_has_imported_counts_as_set(pack, pack_variables, monkeypatch):
    late = types.ModuleType(f"{PACK}.late")
    exec(LATE, vars(late))  # noqa: S102
    monkeypatch.setitem(sys.modules, late.__name__, late)
    pack_variables.note_late_variables({PACK: (f"{PACK}/__init__.py", True)})
    found = filter(pack_variables.was_set, pack_variables.variables_of([late.step]))
    assert pack_variables.names_of(found) == {(late.__name__, "", "count"), (late.__name__, "", "table")}
    assert _set(pack_variables, pack) == [], "what was known stays known"


SET = {
    "a variable": (lambda pack: setattr(pack, "scale", 2.0), ("", "", "scale")),
    "a function": (lambda pack: setattr(pack, "helper", lambda: 0), ("", "", "helper")),
    "a part of a container": (
        lambda pack: pack.tables["deep"][0].update(a=2),
        ("", "", "tables"),
    ),
    "an attribute of an object": (
        lambda pack: setattr(pack.settings, "value", 2.0),
        ("", "", "settings"),
    ),
    "an attribute of a class": (
        lambda pack: setattr(pack.Settings, "strength", 2.0),
        ("", "Settings", "strength"),
    ),
    "another module's": (lambda pack: setattr(pack.other, "mode", 2), (".other", "", "mode")),
}


@pytest.mark.parametrize("kind", SET)
def test_what_was_set_since_is_found(pack_variables, pack, kind):
    set_it, expected = SET[kind]
    set_it(pack)
    assert _set(pack_variables, pack) == [expected]


def test_code_that_another_pack_put_there_at_its_import_counts_as_set(pack, pack_variables):
    other = types.FunctionType(pack.helper.__code__, {"__name__": "/somewhere/custom_nodes/other.patches"})
    pack.helper, pack.Settings.total = other, other
    pack_variables.note_variables({PACK: (f"{PACK}/__init__.py", True)})
    assert _set(pack_variables, pack) == [("", "", "helper"), ("", "Settings", "total")]


def test_what_the_code_does_not_name_stays(pack_variables, pack):
    pack.unused = 2.0
    assert _set(pack_variables, pack) == []


def test_what_was_set_back_is_no_longer_found(pack_variables, pack):
    before = pack.scale
    pack.scale = 2.0
    pack.scale = before
    assert _set(pack_variables, pack) == []


def test_values_of_a_job_are_put_back_but_not_those_that_it_left(pack_variables, pack):
    scale, mode = Replaced(PACK, "", "scale", 3.0), Replaced(f"{PACK}.other", "", "mode", AS_IMPORTED)
    strength = Replaced(PACK, "Settings", "strength", 4.0)
    pack_variables.put_back([scale, mode, strength])
    assert (pack.scale, pack.other.mode, pack.Settings.strength) == (3.0, 0, 4.0)
