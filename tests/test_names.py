"""One meaning, one name: no class name is used twice, and no new public name has a word of the pack's private dialect.

The list of exceptions may only shrink: an entry that is no longer needed also fails a test.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    ROOT / "__init__.py",
    *sorted((ROOT / "parallel_backend").rglob("*.py")),
    *sorted((ROOT / "nodes").rglob("*.py")),
]
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# Words for which the field or plain English has another: own (local), whole (full, unsplit), told and said (reported),
# kept (cached, stored), wanted (requested), alike (equal), others (the rest, by name), together, begun (started).
DIALECT = re.compile(
    r"(?:^|_)(own|whole|told|untold|said|kept|wanted|alike|others|aside|together|begun)(?:_|$)"
)
# Public names that have one of these words today. `whole` is a field of the table of models, which the proof of each
# class covers: under another name all classes would have to be proven again.
SPEAK_DIALECT = {"whole"}


def _words(name):
    """Returns a name in lower case, its words joined by underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _public_names(body):
    """Yields the names of functions, classes, constants, methods and fields, including those with an underscore."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if isinstance(node, ast.ClassDef):
            yield from _public_names(node.body)


def test_a_class_name_has_one_meaning():
    counts = Counter(
        node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counts.items() if count > 1} == set()


def test_public_names_are_the_fields_or_plain_english():
    names = {name for tree in TREES.values() for name in _public_names(tree.body) if not name.startswith("_")}
    found = {name for name in names if DIALECT.search(_words(name))}
    assert found == SPEAK_DIALECT, "a new name of the dialect, or an entry to take out of SPEAK_DIALECT"


def test_words_are_found_in_names_of_every_form():
    assert all(DIALECT.search(_words(name)) for name in ("KeptKeys", "own_rows", "MOST_OTHERS", "run_whole"))
    assert not any(DIALECT.search(_words(name)) for name in ("download", "owner", "sidecar", "TokenBlocks"))
