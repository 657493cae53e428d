"""The picture of rooms in docs/how-it-works.md agrees with the imports in the code."""

from __future__ import annotations

import shutil

import pytest

from draw_rooms import PAGE, ROOT, main


def test_the_picture_is_of_the_imports_as_they_are():
    assert main(["--check"]) == 0, "run python scripts/draw_rooms.py"


@pytest.fixture
def copy(tmp_path):
    for folder in ("parallel_backend", "nodes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / PAGE).parent.mkdir()
    shutil.copy(ROOT / PAGE, tmp_path / PAGE)
    return tmp_path


def test_a_new_import_is_noticed_and_drawn(copy):
    file = copy / "parallel_backend" / "job" / "__init__.py"
    file.write_text(file.read_text("utf-8") + "\nfrom ..rank import work\n", "utf-8")
    assert main(["--check"], copy) == 1
    assert main([], copy) == 0 and "    job --> rank\n" in (copy / PAGE).read_text("utf-8")
    assert main(["--check"], copy) == 0


def test_a_page_without_the_marks_is_named(copy):
    (copy / PAGE).write_text("# How it works\n", "utf-8")
    with pytest.raises(ValueError, match="how-it-works"):
        main(["--check"], copy)
