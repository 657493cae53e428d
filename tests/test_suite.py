"""The suite itself: tests share code only in tests/support and tests/closed_forms, so each file can be run alone."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """Returns the dotted names that the file imports; `from a import b` gives `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_test_imports_another():
    found = {
        str(path.relative_to(TESTS)): sorted(names)
        for path in TESTS.rglob("*.py")
        if (
            names := {
                name for name in imported(path) if "test_" in name and name.startswith(("tests.", "test_"))
            }
        )
    }
    assert found == {}
