"""Draws the picture of rooms in docs/how-it-works.md from the imports: an arrow goes from a package to one it imports.

    python scripts/draw_rooms.py [--check]

`--check` writes nothing, and exits with 1 if the page shows another picture.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs", "how-it-works.md")
START, END = "<!-- drawn by scripts/draw_rooms.py -->", "<!-- end of the drawing -->"
_BACKEND, _NODES = "parallel_backend", "nodes"
_VOCABULARY = "wire"  # most rooms import it, so a line below the picture lists them instead of arrows


def rooms(root: Path) -> dict[str, set[str]]:
    """Returns the rooms below `root`, each with the other rooms that its files import."""
    backend = root / _BACKEND
    names = sorted(path.parent.name for path in backend.glob("*/__init__.py"))
    folders = {_NODES: root / _NODES} | {name: backend / name for name in names}
    found: dict[str, set[str]] = {name: set() for name in folders}
    for name, folder in folders.items():
        for path in folder.rglob("*.py"):
            found[name] |= {room for module in _imported(path, root) if (room := _room(module)) in folders}
        found[name].discard(name)
    return found


def _imported(path: Path, root: Path) -> set[str]:
    """Returns the full names that the file imports relatively, as all imports within the pack are."""
    package = path.relative_to(root).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *((node.module or "").split("."))]
            found |= {".".join(filter(None, [*base, alias.name])) for alias in node.names}
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == _BACKEND and len(parts) > 1 else parts[0]


def drawing(found: dict[str, set[str]]) -> str:
    """Returns the picture as a mermaid block, and a line about the room that it leaves out."""
    shown = {name: imported - {_VOCABULARY} for name, imported in found.items() if name != _VOCABULARY}
    arrows = [
        f"    {name} --> {' & '.join(sorted(imported))}" for name, imported in shown.items() if imported
    ]
    users = sorted(name for name, imported in found.items() if _VOCABULARY in imported)
    listed = ", ".join(f"`{name}/`" for name in users)
    return "\n".join(
        [
            "```mermaid",
            "flowchart TD",
            *arrows,
            "```",
            "",
            f"Not drawn: `{_VOCABULARY}/`, which {listed} import.",
        ]
    )


def updated(page: str, picture: str) -> str:
    """Returns the page with this picture between the two marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{PAGE} needs the lines {START} and {END}")
    return f"{before}{START}\n{picture}\n{END}{after}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is old")
    check = parser.parse_args(arguments).check
    page = (root / PAGE).read_text("utf-8")
    wanted = updated(page, drawing(rooms(root)))
    if check and page != wanted:
        print(f"{PAGE} is out of date: run python scripts/draw_rooms.py")
        return 1
    if not check:
        (root / PAGE).write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
