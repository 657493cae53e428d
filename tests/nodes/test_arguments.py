"""Model calls as ComfyUI makes them become plain trees: what goes along, what stays, what is refused by its name."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
import torch

import parallel_backend.models.proof.states
import parallel_backend.wire.arguments  # noqa: F401  the module under test must meet these very ones
from comfy_modules import import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.tiny.cases import CASES
from parallel_backend.models.proof.states import PROVEN_HERE, Verdict
from parallel_backend.requests import BANDS, BLOCK, ROWS, STAY
from parallel_backend.wire.arguments import pack_arguments, unpack_arguments

arguments = import_node_module("nodes.model.arguments")
patches = import_node_module("nodes.model.patches")
X, T = torch.zeros(2, 16, 3, 4, 4), torch.ones(2)
USUAL = {
    "cond_or_uncond": [0, 1],
    "uuids": [uuid.uuid4()],
    "sigmas": torch.ones(2),
    "sample_sigmas": torch.ones(5),
    "wrappers": {"diffusion_model": {"pack": [print]}},
    "callbacks": {},
    "patches": {"double_block": []},
    "patches_replace": {},
    "prefetch_dynamic_vbars": False,
    "parallel_strategy": SimpleNamespace(),
}


def call(options=None, module="WanModel", verdict=PROVEN_HERE, **kwargs):
    kwargs["transformer_options"] = {**USUAL, **(options or {})}
    return arguments.module_call(module, verdict, (X, T), kwargs, patches.CarriedPatches())


def test_a_usual_call_keeps_its_tensors_and_leaves_python_at_home():
    made = call(context=torch.ones(2, 7, 8), clip_fea=None)
    assert made.rows == 2 and made.method == "forward" and made.args[0] is not None
    assert set(made.kwargs) == {"context", "clip_fea", "transformer_options"}
    assert set(made.kwargs["transformer_options"]) == {"cond_or_uncond", "sigmas", "sample_sigmas"}
    args, kwargs = unpack_arguments(pack_arguments((made.args, made.kwargs)))
    assert torch.equal(args[0], X) and kwargs["clip_fea"] is None


def test_where_tokens_stay_is_decided_by_the_call():
    assert call(context=torch.ones(2, 7, 8)).tokens == STAY
    assert call(context=torch.ones(2, 7, 8), ref_latent=X).tokens == BLOCK
    assert call({"rope_options": {"scale_x": 2.0}}, context=torch.ones(2, 7, 8)).tokens == BLOCK
    assert call(module="UNetModel", context=torch.ones(2, 7, 8)).tokens == BANDS
    assert call(verdict=Verdict(BLOCK), context=torch.ones(2, 7, 8)).tokens == BLOCK, (
        "of a version not proven"
    )


def test_a_latent_in_parts_has_the_rows_of_its_first():
    latent = [X, torch.zeros(2, 8, 7, 16)]
    made = arguments.module_call("LTXAVModel", PROVEN_HERE, (latent, (T, T)), {}, patches.CarriedPatches())
    assert made.rows == 2 and made.args[1][0] is not None


def test_what_a_module_makes_itself_stays_at_home():
    payload = {"seed": 3, "layout": SimpleNamespace(segments=[]), "cond_video_latents": [torch.ones(2)]}
    made = call(module="MiniMaxH3Model", minimax_payload=payload)
    assert set(made.kwargs["minimax_payload"]) == {"seed", "cond_video_latents"} and made.tokens == STAY
    assert "layout" in payload, "ComfyUI's own is left as it is"


def test_a_method_has_the_rows_of_its_first_argument():
    made = arguments.method_call("preprocess_text_embeds", (torch.ones(1, 7, 8),), {"unprocessed": True})
    assert (made.method, made.rows, made.tokens) == ("preprocess_text_embeds", 1, ROWS)


class Node:
    """As ComfyUI's nodes make patches: functions in a method."""

    def patch(self):
        def patched(): ...

        return patched


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patches": {"double_block": [print, Node().patch()]}}, "a model patch by print and Node yet"),
        ({"patches": {"a": [Node(), 1.0], "b": [Node().patch]}}, "a model patch by Node yet"),
        ({"patches_replace": {"dit": {("double_block", 1): print}}}, "a replaced attention block by print"),
        ({"optimized_attention_override": lambda: 0}, f"another attention function by {__name__} (ComfyUI's"),
        ({"optimized_attention_override": print}, "--use-sage-attention"),
        (
            {"my_pack": {"deep": [SimpleNamespace()]}},
            "the model option 'my_pack', which holds a SimpleNamespace",
        ),
        ({"keyed": {(1, 2): 3}}, "the model option 'keyed', which holds a dict"),
    ],
)
def test_what_python_alone_knows_is_refused_by_its_name(options, words):
    with pytest.raises(RequestError) as raised:
        call(options)
    assert words in str(raised.value) and "lux" not in str(raised.value)


def test_an_argument_that_is_an_object_is_refused_by_its_name():
    with pytest.raises(RequestError, match="argument 'pose', which holds a SimpleNamespace"):
        call(pose=SimpleNamespace())


def test_sizes_and_numbers_of_other_libraries_become_plain():
    numpy = pytest.importorskip("numpy")
    made = call(shape=torch.Size([1, 2]), strength=numpy.float32(0.5))
    assert made.kwargs["shape"] == (1, 2) and type(made.kwargs["shape"]) is tuple
    assert made.kwargs["strength"] == 0.5 and type(made.kwargs["strength"]) is float


class _Module:
    def forward(self, x, timestep, context, num_tokens, attention_mask=None, **kwargs):
        """As comfy.ldm.lumina.model.NextDiT's."""


def test_wrappers_get_arguments_where_the_module_would_hand_them_over():
    signature = arguments.ModuleSignature(_Module)
    given = {"context": "c", "num_tokens": 3, "transformer_options": {}, "control": None}
    args, kwargs = signature.positional((X, T), given)
    assert args == (X, T, "c", 3, None)
    assert kwargs == {"transformer_options": {}, "control": None}
    assert signature.by_name(args, kwargs) == ((X, T), {**given, "attention_mask": None})


@pytest.mark.parametrize(
    "name", ["LTXVModel", "MiniMaxH3Model", "Kandinsky5", "JoyImageTransformer3DModel", "Flux"]
)
def test_wrappers_get_what_comfyuis_own_class_hands_to_them(name):
    """EasyCache, for one, looks for an argument by its place."""
    import_comfyui_here()
    make, inputs = next(iter(CASES[name].values()))
    module, (args, kwargs), seen = make(), inputs(1, 8, 8), []

    def wrapper(executor, *given, **named):
        seen.append((given, named))
        raise StopIteration

    options = {**(kwargs.get("transformer_options") or {}), "wrappers": {"diffusion_model": {"a": [wrapper]}}}
    kwargs = {**kwargs, "transformer_options": options}
    with pytest.raises(StopIteration):
        module(*args, **kwargs)
    signature = arguments.ModuleSignature(type(module))
    found = signature.positional(args, kwargs)
    ((given, named),) = seen
    assert [type(value) for value in found[0]] == [type(value) for value in given]
    assert set(found[1]) == set(named)
    again = signature.by_name(*found)[1]
    assert all(again[key] is value for key, value in kwargs.items())
