"""A safetensors header is read as the library reads it, and a damaged or hostile file is refused by name and reason."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from hostile_bytes import damaged
from parallel_backend.errors import CheckpointError
from parallel_backend.models.checkpoint import Header, read_header
from sparse_checkpoint import file_bytes

VALID = save(
    {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    },
    metadata={"format": "pt"},
)
_HEADER_END = 8 + int.from_bytes(VALID[:8], "little")


def entry(begin: int = 0, end: int = 4, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_the_header_says_what_was_saved(tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(VALID)
    header = read_header(path)
    assert header.name == "good.safetensors"
    assert header.file_bytes == len(VALID)
    assert {key: (e.dtype, e.shape, e.end - e.begin) for key, e in header.tensors.items()} == {
        "a.weight": ("F32", (2, 3), 24),
        "b": ("BF16", (5,), 10),
        "empty": ("F32", (0, 4), 0),
        "fp8": ("F8_E4M3", (3,), 3),
    }


@pytest.mark.skipif(os.name != "posix", reason="names are bytes there alone")
@pytest.mark.parametrize("path", [b"odd\xff.safetensors", b"odd\xff/model.safetensors"])
def test_a_name_that_is_no_text_is_refused_in_words(tmp_path, path):
    file = tmp_path / os.fsdecode(path)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(VALID)
    with pytest.raises(CheckpointError, match=r"is not valid UTF-8\. Rename it") as refused:
        read_header(file)
    str(refused.value).encode()


HOSTILE = {
    "an empty file": (b"", "truncated"),
    "seven bytes": (b"\x01" * 7, "truncated"),
    "a pickle": (pickle.dumps({"weight": [1.0] * 100}), "pickle"),
    "a zipped pickle": (b"PK\x03\x04" + bytes(100), "pickle"),
    "a GGUF file": (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
    "a web page": (b"<!DOCTYPE html><html>not found</html>", "not a safetensors file"),
    "a length beyond the file": ((1000).to_bytes(8, "little") + b"{}", "claims 1000 bytes"),
    "a length beyond memory": ((2**63).to_bytes(8, "little") + b"{}", "claims 9223372036854775808"),
    "a length beyond the limit": ((2**64 - 1).to_bytes(8, "little") + b"{}", "truncated or not"),
    "no JSON": (file_bytes(b"{'a': 1}"), "not valid JSON"),
    "no UTF-8": (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (file_bytes([]), "not a JSON object"),
    "no tensors": (file_bytes({"__metadata__": {"format": "pt"}}), "no tensors"),
    "metadata that is no text": (file_bytes({"__metadata__": {"a": 1}, "w": entry()}, bytes(4)), "metadata"),
    "metadata that is a list": (file_bytes({"__metadata__": [], "w": entry()}, bytes(4)), "metadata"),
    "a name twice": (
        file_bytes(b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        "occurs twice",
    ),
    "a field twice": (
        file_bytes(b'{"w": {"dtype": "F32", "dtype": "I8", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
        "occurs twice",
    ),
    "deep nesting": (file_bytes(b"[" * 200_000 + b"]" * 200_000), "not valid JSON"),
    "deep nesting in a tensor": (file_bytes(b'{"w": ' * 100_000 + b"1" + b"}" * 100_000), "not valid JSON"),
    "an endless number": (file_bytes(b'{"w": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "a tensor that is a number": (file_bytes({"w": 1}), "malformed"),
    "a missing field": (file_bytes({"w": {"dtype": "F32", "shape": [1]}}, bytes(4)), "malformed"),
    "an added field": (file_bytes({"w": {**entry(), "code": "x"}}, bytes(4)), "malformed"),
    "an unknown dtype": (file_bytes({"w": entry(dtype="Q4_K")}, bytes(4)), "unsupported dtype 'Q4_K'"),
    "a dtype that is a list": (file_bytes({"w": entry(dtype=["F32"])}, bytes(4)), "unsupported dtype"),
    "a negative side": (file_bytes({"w": entry(shape=(-1, -1))}, bytes(4)), "impossible shape"),
    "a fraction of a side": (file_bytes({"w": entry(shape=(1.0,))}, bytes(4)), "impossible shape"),
    "a true side": (file_bytes({"w": entry(shape=(True,))}, bytes(4)), "impossible shape"),
    "a side of infinity": (
        file_bytes(b'{"w": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'),
        "impossible shape",
    ),
    "a huge side": (file_bytes({"w": entry(shape=(2**63,))}, bytes(4)), "impossible shape"),
    "sides that overflow": (file_bytes({"w": entry(shape=(2**62, 4))}, bytes(4)), "does not fit"),
    "a thousand sides": (file_bytes({"w": entry(shape=(1,) * 1000)}, bytes(4)), "impossible shape"),
    "three offsets": (file_bytes({"w": {**entry(), "data_offsets": [0, 2, 4]}}, bytes(4)), "impossible"),
    "an end before its begin": (file_bytes({"w": entry(4, 0)}, bytes(4)), "does not fit"),
    "too few bytes for the shape": (file_bytes({"w": entry(shape=(2,))}, bytes(4)), "does not fit"),
    "tensors on top of each other": (file_bytes({"v": entry(0, 4), "w": entry(0, 4)}, bytes(8)), "overlaps"),
    "tensors that overlap": (file_bytes({"v": entry(0, 8, (2,)), "w": entry(4, 8)}, bytes(8)), "overlaps"),
    "a hole": (file_bytes({"v": entry(0, 4), "w": entry(8, 12)}, bytes(12)), "hole"),
    "data before the first tensor": (file_bytes({"w": entry(4, 8)}, bytes(8)), "hole"),
    "data cut short": (VALID[:-1], "truncated"),
    "data after the last tensor": (VALID + b"\x00", "follow its last tensor"),
    "a header and nothing more": (VALID[:_HEADER_END], "truncated"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_with_name_reason_and_remedy(tmp_path, what):
    content, reason = HOSTILE[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        read_header(path)
    message = str(refusal.value)
    assert message.startswith("model.safetensors is refused: ")
    assert reason in message
    assert "choose another" in message
    assert str(tmp_path) not in message
    assert len(message) < 500


def test_a_path_that_holds_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for a writer
    for name, reason in (
        ("absent.safetensors", "No such file"),
        ("pipe.safetensors", "not a regular file"),
        (".", "not a regular file"),
        ("a\0b.safetensors", "null"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read_header(tmp_path / name)


def judge(content: bytes) -> None:
    """Checks that `content` raises CheckpointError, or gives the tensors and shapes that safetensors reads as well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.safetensors"
        path.write_bytes(content)
        try:
            header = read_header(path)
        except CheckpointError as error:
            assert "fuzzed.safetensors" in str(error)
            assert folder not in str(error)
            return
        assert isinstance(header, Header)
        with safe_open(path, framework="pt") as opened:
            assert set(opened.keys()) == set(header.tensors)
            for key, found in header.tensors.items():
                assert tuple(opened.get_slice(key).get_shape()) == found.shape


@settings(max_examples=300)
@given(damaged([VALID]))
def test_a_damaged_file_never_raises_anything_else(content):
    judge(content)


_NUMBERS = st.one_of(st.integers(-1, 16), st.integers(), st.floats(), st.booleans(), st.none())
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "NO"]), st.none()),
        "shape": st.one_of(st.lists(_NUMBERS, max_size=3), st.integers()),
        "data_offsets": st.one_of(st.lists(_NUMBERS, max_size=3), st.text(max_size=3)),
    }
)
_JSON = st.recursive(
    st.one_of(_NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(max_size=5), st.one_of(_ENTRIES, _JSON), max_size=4), st.integers(0, 64))
def test_random_headers_never_raise_anything_else(header, data):
    judge(file_bytes(header, bytes(data)))
