"""Decides which split of a model class is safe in the user's ComfyUI: one that was proven on the same sources.

Another version may compute a class differently (HunyuanVideo once had its image before the text). No signature shows
this, and it gives wrong pictures without an error. So the pack has proven.json with digests of the sources on which
self-tests passed. A class with other sources is tested once, when it is first used. Imports neither torch nor comfy.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, TOKEN_MODES
from ...wire.checks.findings import SelfTest
from ..tokens.table import TABLE, ModuleClass, has_stages, token_mode

PROVEN = Path(__file__).with_name("proven.json")  # written by scripts/prove_models.py
_SOURCES = "comfy.ldm"  # imports from elsewhere do not affect the order of tokens
_ATTENTION = "comfy/ldm/modules/attention.py"
_OPERATIONS = "comfy/ops.py"  # how convolutions compute, which splitting into bands of rows replaces

_Stamps = dict[Path, tuple[int, int]]  # mtime in ns and size
_known: dict[tuple[str, str], tuple[_Stamps, str]] = {}


@dataclass(frozen=True)
class ClassVerdict:
    """The safe split of a class. `mode`: the most that its tokens may be split, one of requests.TOKEN_MODES; `words`:
    for the user, why that is less than the table says, else empty."""

    mode: str
    words: str = ""


UNKNOWN = ClassVerdict(ATTENTION)  # for a class that is not in the table: exact for any class
PROVEN_HERE = ClassVerdict(STAY)


def trusted_mode(class_name: str, kwargs: Mapping[str, Any], verdict: ClassVerdict) -> str:
    """Returns token_mode() of a call, limited to the mode of the verdict on the class."""
    return max(token_mode(class_name, kwargs), verdict.mode, key=TOKEN_MODES.index)


def is_proven(class_name: str, digest: str) -> bool:
    """Returns True if the pack has a proof for this entry_digest()."""
    return digest in _proven().get(class_name, ())


def verdict_of(found: SelfTest) -> ClassVerdict:
    """Returns the verdict from the outcome of a self-test."""
    name = found.class_name
    if found.mode in (STAY, BANDS):
        return PROVEN_HERE
    if found.mode == ATTENTION:
        return ClassVerdict(
            ATTENTION,
            f"this version of ComfyUI computes {name} in another way than the pack knows: in place of bands of rows, "
            f"devices share out the queries of attention",
        )
    if found.mode == BLOCK:
        return ClassVerdict(
            BLOCK,
            f"between its blocks, this version of ComfyUI computes {name} in another way than the pack knows: each "
            f"block gathers what it gives, which is exact and takes longer",
        )
    return ClassVerdict(
        ROWS,
        f"this version of ComfyUI computes {name} in another way than the pack knows: only whole images and prompts "
        f"are shared out (CFG, data)",
    )


def untested(class_name: str, reason: str) -> ClassVerdict:
    """Returns the verdict for a class whose self-test gave no outcome. `reason`: why."""
    return ClassVerdict(
        ROWS,
        f"this version of ComfyUI is new to the pack, and a test of how it computes {class_name} did not end "
        f"({reason}): only whole images and prompts are shared out (CFG, data)",
    )


def entry_digest(root: str, class_name: str) -> str:
    """Returns the digest of everything that a proof covers: the table's entry, has_stages(), and the class's sources.

    `root`: ComfyUI's folder. Raises OSError or SyntaxError if the sources cannot be read.
    """
    entry = TABLE[class_name]
    sources = [entry.source, _OPERATIONS] if entry.bands else [entry.source]
    digests = "\n".join(source_digest(root, source) for source in sources)
    stages = " in stages" if has_stages(class_name) else ""
    return _sha256(f"{digests}\n{_written_out(entry)}{stages}")


def source_digest(root: str, source: str) -> str:
    """Returns the digest of the files `source` and attention.py in ComfyUI's folder `root`, and of all files below
    comfy/ldm that they import, also indirectly. Line ends do not matter. Raises OSError or SyntaxError if a file cannot
    be read."""
    kept = _known.get((root, source))
    if kept is not None and all(_stamp(path) == stamp for path, stamp in kept[0].items()):
        return kept[1]
    base, todo = Path(root), [source, _ATTENTION]
    texts: dict[str, str] = {}
    stamps: _Stamps = {}
    while todo:
        name = todo.pop()
        if name not in texts:
            path = base / name
            stamps[path] = _stamp(path)
            texts[name] = path.read_text(encoding="utf-8")
            todo += _imported(base, name, texts[name])
    digest = _sha256("".join(f"{name}\n{len(texts[name])}\n{texts[name]}" for name in sorted(texts)))
    _known[root, source] = (stamps, digest)
    return digest


def _imported(base: Path, name: str, text: str) -> Iterator[str]:
    """Yields the files of _SOURCES that the text of file `name` imports anywhere, also inside functions."""
    package = Path(name).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            modules = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            if f"{module}.".startswith(f"{_SOURCES}."):
                path = module.replace(".", "/")
                yield from (file for file in (f"{path}.py", f"{path}/__init__.py") if (base / file).is_file())


def _stamp(path: Path) -> tuple[int, int]:
    """Returns (mtime in ns, size), or (0, 0) for a missing file: reading it raises the error."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _written_out(entry: ModuleClass) -> str:
    """Returns the entry as text that is equal in every process; the order of a set is not."""
    return f"{entry.regions!r} {sorted(entry.stays_with)!r}"


@functools.cache
def _proven() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(PROVEN.read_text())
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
