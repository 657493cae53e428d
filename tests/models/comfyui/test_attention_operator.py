"""The operator by which compiled blocks call ComfyUI's attention."""

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.models.attention import order_of
from parallel_backend.models.comfyui import attention_operator


@pytest.fixture
def attention():
    import_comfyui_here()
    from comfy.ldm.modules import attention

    return attention


@pytest.mark.parametrize(
    ("form", "positional"),
    [
        ({"transformer_options": {}}, ()),
        ({"skip_reshape": True, "scale": 0.3}, ()),
        ({"skip_reshape": True, "skip_output_reshape": True}, ()),
        ({"enable_gqa": True, "low_precision_attention": False}, (None, None, True, True)),
    ],
)
@torch.inference_mode()
def test_a_compiled_call_gives_what_comfyuis_function_gives(attention, form, positional):
    """Kernels of inductor trust the operator's description of its output and of what it shares with its inputs."""
    by_heads = form.get("skip_reshape") or bool(positional)
    q = torch.randn(2, 2, 6, 4) if by_heads else torch.randn(2, 6, 8)
    k = q[:, :1] if form.get("enable_gqa") else q

    def call(q, k):
        return attention.optimized_attention(q, k, k, 2, *positional, **form) + 1

    expected = call(q, k)
    found = torch.compile(call, backend="eager", fullgraph=True)(q, k)
    assert found.shape == expected.shape and torch.equal(found, expected)
    given = dict(zip(attention_operator._NAMES, positional, strict=False)) | form
    values = [given.get(name, default) for name, _, default in attention_operator._ARGUMENTS]
    torch.library.opcheck(
        attention_operator._attend,
        (q, k, k, 2, "optimized_attention", "", order_of(q), *values),
        test_utils=("test_schema", "test_faketensor"),
    )


@torch.inference_mode()
def test_a_call_with_an_argument_that_is_not_known_cannot_be_compiled(attention):
    def call(q):
        return attention.optimized_attention(q, q, q, 2, other=1)

    q = torch.randn(2, 6, 8)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):  # Compiler runs such blocks uncompiled
        torch.compile(call, backend="eager", fullgraph=True)(q)
    assert call(q).shape == q.shape
