"""The digest of a class's sources changes only with files of comfy/ldm that it needs; a proof limits a mode."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from comfy_harness import require_comfyui
from comfyui_source import PINNED_VERSION, comfyui_version
from parallel_backend.models.proof import states
from parallel_backend.models.proof.states import (
    PROVEN,
    PROVEN_HERE,
    UNKNOWN,
    ClassVerdict,
    entry_digest,
    is_proven,
    source_digest,
    trusted_mode,
    verdict_of,
)
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS, STAY
from parallel_backend.wire.checks.findings import SelfTest

SOURCE = "comfy/ldm/family/model.py"
FILES = {
    SOURCE: "import torch\nfrom .layers import Block\nimport comfy.ldm.common as c\nimport comfy.ops\n",
    "comfy/ldm/family/layers.py": "from ..maths import rope\n\ndef late():\n    from comfy.ldm import lazy\n",
    "comfy/ldm/family/unused.py": "x = 1\n",
    "comfy/ldm/maths.py": "def rope(): ...\n",
    "comfy/ldm/common.py": "from comfy.ldm.package import thing\n",
    "comfy/ldm/package/__init__.py": "thing = 1\n",
    "comfy/ldm/lazy.py": "import comfy.ldm.family.model\n",  # a circular import
    "comfy/ldm/modules/attention.py": "def optimized_attention(): ...\n",
    "comfy/ops.py": "x = 1\n",
    "comfy/ldm/other.py": "x = 1\n",
}
IMPORTED = FILES.keys() - {"comfy/ldm/family/unused.py", "comfy/ops.py", "comfy/ldm/other.py"}


def write_files(folder, line_end="\n"):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.replace("\n", line_end).encode())
    return folder


@pytest.fixture
def root(tmp_path):
    return write_files(tmp_path)


def digest(root):
    return source_digest(str(root), SOURCE)


@pytest.mark.parametrize("name", FILES)
def test_a_change_counts_where_the_class_imports_it(root, name):
    before = digest(root)
    (root / name).write_text(FILES[name] + "# another line\n")
    assert (digest(root) != before) == (name in IMPORTED)


def test_the_same_text_is_the_same_wherever_it_lies_and_however_its_lines_end(root, tmp_path_factory):
    elsewhere = write_files(tmp_path_factory.mktemp("elsewhere"), "\r\n")
    assert digest(elsewhere) == digest(root)


def test_sources_are_read_again_only_after_a_change(root, monkeypatch):
    before = digest(root)
    read = []
    stock = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **kw: (read.append(self.name), stock(self, **kw))[1])
    assert digest(root) == before and read == []
    os.utime(root / "comfy/ldm/maths.py", ns=(1, 1))
    assert digest(root) == before and len(read) == len(IMPORTED)


def test_sources_that_are_missing_or_broken_raise(root):
    digest(root)
    (root / "comfy/ldm/maths.py").write_text("def rope(:\n")
    with pytest.raises(SyntaxError):
        digest(root)
    (root / SOURCE).unlink()
    with pytest.raises(FileNotFoundError):
        digest(root)


def test_a_proof_is_of_the_entry_too(root, monkeypatch):
    entry = replace(TABLE["Flux"], source=SOURCE)
    monkeypatch.setitem(TABLE, "Flux", entry)
    before = entry_digest(str(root), "Flux")
    for changed in (
        replace(entry, stays_with=entry.stays_with | {"another"}),
        replace(entry, regions=TABLE["WanModel"].regions),
    ):
        monkeypatch.setitem(TABLE, "Flux", changed)
        assert entry_digest(str(root), "Flux") != before


def test_an_entry_has_one_digest_in_every_process():
    """The order of a set of strings differs between processes."""
    code = (
        "import sys; from parallel_backend.models.proof import states; "
        "from parallel_backend.models.tokens import table; "
        "assert not {'torch', 'comfy'} & set(sys.modules); "
        "print([states._written_out(entry) for entry in table.TABLE.values()])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


@pytest.mark.parametrize(
    ("verdict", "proven_call", "other_call"),
    [
        (PROVEN_HERE, STAY, BLOCK),
        (ClassVerdict(BLOCK), BLOCK, BLOCK),
        (ClassVerdict(ROWS), ROWS, ROWS),
    ],
)
def test_a_mode_goes_as_far_as_its_proof(verdict, proven_call, other_call):
    assert trusted_mode("WanModel", {"context": 1}, verdict) == proven_call
    assert trusted_mode("WanModel", {"context": 1, "camera": 1}, verdict) == other_call
    assert trusted_mode("StageC", {"clip_text": 1}, UNKNOWN) == ATTENTION
    assert trusted_mode("UNetModel", {"context": 1}, PROVEN_HERE) == BANDS
    unproven = verdict_of(SelfTest("UNetModel", ATTENTION, 0.1))
    assert trusted_mode("UNetModel", {"context": 1}, unproven) == ATTENTION
    assert "in place of bands of rows" in unproven.words


def test_what_a_test_found_in_words():
    assert (
        verdict_of(SelfTest("Flux", STAY, 1e-7))
        == PROVEN_HERE
        == verdict_of(SelfTest("UNetModel", BANDS, 1e-7))
    )
    assert not UNKNOWN.words
    assert verdict_of(SelfTest("HunyuanVideo", ROWS, 0.07)) == ClassVerdict(
        ROWS,
        "this version of ComfyUI computes HunyuanVideo in another way than the pack knows: only whole images and "
        "prompts are shared out (CFG, data)",
    )
    between = verdict_of(SelfTest("Flux", BLOCK, 0.07))
    assert between.mode == BLOCK and "each block gathers" in between.words


def test_every_class_is_proven_on_the_pinned_comfyui():
    root = require_comfyui()
    version = comfyui_version(root)
    if version != PINNED_VERSION:
        pytest.skip(f"this is ComfyUI {version}, and the pack's proofs are held against {PINNED_VERSION}")
    missing = [name for name in TABLE if not is_proven(name, entry_digest(str(root), name))]
    assert missing == [], "run scripts/prove_models.py"


def test_proofs_are_of_classes_of_the_table_and_in_order():
    text = PROVEN.read_text()
    proven = json.loads(text)
    assert list(proven) == sorted(proven) and set(proven) == set(TABLE)
    assert all(digests == sorted(set(digests)) for digests in proven.values())
    assert text == json.dumps(proven, indent=2) + "\n"
    assert states.is_proven("NoSuchClass", "") is False
