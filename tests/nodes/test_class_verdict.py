"""The verdict on a model class of a ComfyUI: tested once if the sources of the class are new, then stored."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from comfyui_copies import IMAGE_BEFORE_TEXT, copy_of_comfyui
from pack_nodes import import_node_module
from parallel_backend.errors import Cancelled, RankFailed
from parallel_backend.machine.self_tests import NAME, SelfTestStore
from parallel_backend.models.proof.states import PROVEN_HERE, UNKNOWN, entry_digest
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import BLOCK, ROWS, STAY
from parallel_backend.sidecar.self_test import run_self_tests
from parallel_backend.wire.cache_folder import VARIABLE
from parallel_backend.wire.checks.findings import SelfTest

verdicts = import_node_module("nodes.model.class_verdict")
ensure_verdict = verdicts.ensure_verdict
CLASS = "HunyuanVideo"
SENTENCE = (
    "this version of ComfyUI computes HunyuanVideo in another way than the pack knows: only whole images and prompts "
    "are shared out (CFG, data)"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The path of a separate cache folder; the session has no verdicts yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(verdicts, "_session", {})
    return folder


@pytest.fixture
def root(tmp_path):
    """The folder of a ComfyUI in which CLASS has an unknown source."""
    for name in (TABLE[CLASS].source, "comfy/ldm/modules/attention.py"):
        path = tmp_path / "ComfyUI" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\n")
    return tmp_path / "ComfyUI"


@pytest.fixture
def tests(monkeypatch):
    """Stands in for the process of a self-test: `outcome` is its mode or error, `calls` the number of its starts."""
    scripted = SimpleNamespace(outcome=STAY, calls=0)

    def run(root, class_names, *, should_cancel):
        scripted.calls += 1
        if isinstance(scripted.outcome, Exception):
            raise scripted.outcome
        return tuple(SelfTest(name, scripted.outcome, 0.07) for name in class_names)

    monkeypatch.setattr(verdicts, "run_self_tests", run)
    return scripted


@pytest.mark.parametrize(("mode", "words"), [(STAY, ""), (BLOCK, "each block gathers"), (ROWS, SENTENCE)])
def test_new_sources_are_tested_once_and_for_all(root, tests, monkeypatch, mode, words):
    tests.outcome, phases = mode, []
    first = ensure_verdict(str(root), CLASS, phases.append)
    assert first.mode == mode and words in first.words
    assert ensure_verdict(str(root), CLASS, phases.append) == first
    monkeypatch.setattr(verdicts, "_session", {})  # as after a restart
    assert ensure_verdict(str(root), CLASS, phases.append) == first
    assert tests.calls == 1
    assert phases == ["testing how this version of ComfyUI computes HunyuanVideo (10 to 20 seconds, once)"]


def test_other_sources_and_other_entries_are_tested_anew(root, tests, monkeypatch):
    ensure_verdict(str(root), CLASS)
    (root / TABLE[CLASS].source).write_text("import torch  # a comment\n")
    ensure_verdict(str(root), CLASS)
    assert tests.calls == 2
    entry = TABLE[CLASS]
    monkeypatch.setitem(TABLE, CLASS, replace(entry, stays_with=entry.stays_with | {"another"}))
    ensure_verdict(str(root), CLASS)
    assert tests.calls == 3


def test_one_that_crashed_counts_for_this_session_only(root, tests, monkeypatch, cache):
    tests.outcome = RankFailed(0, "the self-test killed by SIGSEGV\nmany\nlines", crashed=True)
    for _ in range(2):
        verdict = ensure_verdict(str(root), CLASS)
    assert tests.calls == 1 and not (cache / NAME).exists()
    assert verdict.mode == ROWS and "SIGSEGV" in verdict.words and "\n" not in verdict.words
    monkeypatch.setattr(verdicts, "_session", {})  # as after a restart
    tests.outcome = STAY
    assert ensure_verdict(str(root), CLASS) == PROVEN_HERE


def test_one_that_is_cancelled_comes_again(root, tests):
    tests.outcome = Cancelled("the self-test was cancelled")
    with pytest.raises(Cancelled):
        ensure_verdict(str(root), CLASS)
    tests.outcome = STAY
    assert ensure_verdict(str(root), CLASS) == PROVEN_HERE and tests.calls == 2


def test_where_nothing_is_to_be_kept_the_session_knows(root, tests, monkeypatch, cache):
    monkeypatch.setenv(VARIABLE, "off")
    tests.outcome = ROWS
    assert ensure_verdict(str(root), CLASS) == ensure_verdict(str(root), CLASS)
    assert tests.calls == 1 and not cache.exists()


def test_classes_that_the_table_does_not_have_need_no_test(tests):
    assert ensure_verdict("/nowhere", "StageC") == UNKNOWN and tests.calls == 0


def test_sources_that_cannot_be_read_are_not_trusted(root, tests):
    (root / TABLE[CLASS].source).unlink()
    verdict = ensure_verdict(str(root), CLASS)
    assert verdict.mode == ROWS and "cannot be read" in verdict.words and tests.calls == 0


def test_an_entry_that_is_not_known_costs_only_itself(cache):
    SelfTestStore().keep("one", SelfTest(CLASS, STAY, 1e-7))
    SelfTestStore().keep("other", SelfTest(CLASS, BLOCK, 1e-7))
    with closing(sqlite3.connect(cache / NAME)) as database, database:
        database.execute("UPDATE outcomes SET mode = 'trust me' WHERE mode = ?", (BLOCK,))
    assert SelfTestStore().find(CLASS, "other") is None
    assert SelfTestStore().find(CLASS, "one") == SelfTest(CLASS, STAY, 1e-7)


def test_sources_that_the_pack_has_a_proof_of_need_no_test(root, tests, monkeypatch):
    monkeypatch.setattr(verdicts, "is_proven", lambda name, digest: digest == entry_digest(str(root), name))
    assert ensure_verdict(str(root), CLASS) == PROVEN_HERE and tests.calls == 0


def test_a_class_that_computes_otherwise_shares_out_whole_images_and_one_that_only_reads_otherwise_is_trusted(
    tmp_path, monkeypatch
):
    """No signature shows that CLASS puts the image before the text: the picture would be wrong without an error. The
    self-test sees no GPU, and text that ComfyUI prints does not damage its answers."""
    reads = 'import torch\nimport os\nprint("hello")\nassert os.environ["CUDA_VISIBLE_DEVICES"] == ""\n'
    same = "LTXVModel"
    changes = {**IMAGE_BEFORE_TEXT, TABLE[same].source: [("import torch\n", reads)]}
    copy = str(copy_of_comfyui(tmp_path / "other", changes))
    results = {test.class_name: test for test in run_self_tests(copy, [CLASS, same])}
    found = results[CLASS]
    assert found.mode == ROWS and found.worst > 1e-3 and not found.error
    monkeypatch.setattr(
        verdicts, "run_self_tests", lambda root, names, **_: [results[name] for name in names]
    )
    verdict = ensure_verdict(copy, CLASS)
    assert (verdict.mode, verdict.words) == (ROWS, SENTENCE)
    assert ensure_verdict(copy, same) == PROVEN_HERE
