"""ComfyUI's own loaders over a mapped file, compared with stock ComfyUI on the same file."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfy_modules import CPU, import_comfyui_here
from comfy_weight_files import write
from fake_cuda import FakeCuda
from mapped_files import is_mapped, resident_bytes
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import CheckpointError, RequestError
from parallel_backend.models.base import ModelPart
from parallel_backend.models.comfyui.common_dtypes import MEMORY, QUESTIONS, agree_on_dtypes
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.tokens import table
from parallel_backend.requests import ComfyUISource, ModelSpec
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tiny_flux import write_tiny_flux

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def source():
    return import_comfyui_here()


@pytest.fixture
def flux_file(tmp_path):
    return write_tiny_flux(tmp_path / "flux.safetensors", dtype=torch.bfloat16)


def _load(path, source, part="diffusion_model", weight_dtype="auto"):
    source = ComfyUISource(source.root, part=part)
    return load(ModelSpec(str(path), "comfyui", weight_dtype, source), CPU)


def _share_in_file(module, path):
    """Returns the share of the parameters' bytes that are pages of the file."""
    inside, total = 0, 0
    for parameter in module.parameters():
        stored = getattr(parameter, "_qdata", parameter)  # if ComfyUI quantised it
        total += stored.nbytes
        inside += stored.nbytes * is_mapped(path, stored)
    return inside / total


def _answer(module):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    conditioning = {"context": random(1, 5, 64), "y": random(1, 32), "guidance": torch.tensor([3.5])}
    with torch.inference_mode():
        return module(random(1, 16, 8, 6), torch.tensor([0.5]), **conditioning, transformer_options={})


def _stock(path, **options):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options=options).model.diffusion_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
def test_weights_are_the_file_and_answers_are_stock_comfyuis(tmp_path, source, dtype):
    path = write_tiny_flux(tmp_path / "flux.safetensors", dtype=torch.float32)
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    model = _load(path, source)
    assert _share_in_file(model.module, path) == 1
    assert torch.equal(_answer(model.module), _answer(_stock(path)))
    assert model.bytes == sum(tensor.nbytes for tensor in load_file(path).values())
    assert model.stored_dtype == str(dtype).removeprefix("torch.")
    assert model.compute_dtype == torch.float32
    assert (type(model.module).__name__, len(model.regions), model.chunks) == ("Flux", 1, (model.module,))


@pytest.mark.parametrize(("dtype", "prefix"), [(torch.bfloat16, ""), (FP8, "transformer.")])
def test_diffusers_key_layout_gives_the_stock_answer(tmp_path, source, prefix, dtype):
    sizes = {"layout": "diffusers", "single_blocks": 2, "dtype": dtype}
    plain = write_tiny_flux(tmp_path / "plain.safetensors", **sizes)
    path = write_tiny_flux(tmp_path / "flux.safetensors", prefix=prefix, **sizes)
    model = _load(path, source)
    assert torch.equal(_answer(model.module), _answer(_stock(plain)))
    assert model.stored_dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("part", "prefix"),
    [
        ("diffusion_model", "transformer."),
        ("diffusion_model", "diffusion_model."),
        ("checkpoint", "model.diffusion_model."),
    ],
)
def test_a_file_with_a_prefix_gives_its_diffusion_model_alone(tmp_path, source, flux_file, part, prefix):
    tensors, path = load_file(flux_file), tmp_path / "prefixed.safetensors"
    others = {"vae.decoder.conv_in.weight": torch.zeros(4), "text_encoders.t5.scale": torch.zeros(3)}
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()} | others, path)
    model = _load(path, source, part)
    assert _share_in_file(model.module, path) == 1
    assert model.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(_answer(model.module), _answer(_stock(flux_file)))


@pytest.mark.parametrize("weight_dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_a_wished_dtype_is_what_the_stock_loader_makes_of_it(source, flux_file, weight_dtype):
    dtype = getattr(torch, weight_dtype)
    model = _load(flux_file, source, weight_dtype=weight_dtype)
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    assert torch.equal(_answer(model.module), _answer(_stock(flux_file, dtype=dtype)))


def test_quantised_weights_stay_quantised(tmp_path, source):
    """The file has a scale for each layer."""
    path = write(tmp_path / "fp8.safetensors", "float8_e4m3fn", blocks=1)
    model = _load(path, source)
    quantised = [p for p in model.module.parameters() if hasattr(p, "_qdata")]
    assert len(quantised) == sum(name.endswith(".comfy_quant") for name in load_file(path)) > 0
    assert model.stored_dtype == "float8_e4m3fn"
    assert not model.scales_by_largest  # on the CPU, weights are dequantised to float32
    for layer in model.module.modules():
        if hasattr(layer, "quant_format"):
            layer._full_precision_mm = False  # as on a GPU that multiplies fp8
    del model.scales_by_largest
    assert model.scales_by_largest


def held_pages(world, path, source):
    """Returns (bytes of the file's pages that a rank still maps after it copied its shares, bytes of the shares)."""
    strategy = ParallelStrategy(ulysses_degree=2, shard_weights=True)
    model = load_under(ModelSpec(str(path), "comfyui", comfyui=source), Layouts(world), strategy)
    return resident_bytes(path), sum(share.nbytes for share in model.byte_sharding.shares)


def test_ranks_that_copied_their_shares_keep_no_page_of_the_file(tmp_path, source):
    path = write_tiny_flux(tmp_path / "flux.safetensors", heads=4)
    for pages, shares in run_ranks(held_pages, 2, path, source, backend="gloo"):
        assert pages < 0.05 * shares


def test_the_loaders_are_stock_again_afterwards(source, flux_file):
    import comfy.model_patcher

    before = comfy.model_patcher.CoreModelPatcher
    model = _load(flux_file, source)
    assert comfy.model_patcher.CoreModelPatcher is before
    assert type(model.patcher) is comfy.model_patcher.ModelPatcher
    assert not model.patcher.is_dynamic()


def test_a_flag_that_sets_the_dtype_does_so_on_the_cpu_too(tmp_path, source, monkeypatch):
    from comfy.cli_args import args

    path = write_tiny_flux(tmp_path / "flux.safetensors", dtype=torch.float32)
    plain = _answer(_load(path, source).module)
    monkeypatch.setattr(args, "bf16_unet", True)
    model = _load(path, source)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert torch.equal(_answer(model.module), _answer(_stock(path)))
    assert not torch.equal(_answer(model.module), plain)


def test_an_older_comfyui_copies_the_weights(source, flux_file, monkeypatch):
    import comfy.model_patcher
    import comfy.sd

    stock = comfy.sd.load_diffusion_model_state_dict
    monkeypatch.setattr(comfy.sd, "load_diffusion_model_state_dict", partial(stock, disable_dynamic=True))
    monkeypatch.delattr(comfy.model_patcher, "CoreModelPatcher")
    model = _load(flux_file, source, weight_dtype="float8_e4m3fn")
    assert {parameter.dtype for parameter in model.module.parameters()} == {FP8}
    monkeypatch.undo()
    assert torch.equal(_answer(model.module), _answer(_stock(flux_file, dtype=FP8)))


@pytest.mark.parametrize("part", ["diffusion_model", "checkpoint"])
def test_a_file_that_comfyui_does_not_know(tmp_path, source, part):
    path = tmp_path / "lora.safetensors"
    save_file({"lora_unet_a.lora_up.weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"does not know what model .*lora\.safetensors holds"):
        _load(path, source, part)


def test_a_damaged_file(tmp_path, source):
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"torn\.safetensors cannot be read"):
        _load(tmp_path / "torn.safetensors", source)


def test_what_cannot_be_loaded_is_said_in_words(source, flux_file):
    for name in ("int8", "Tensor", "no_such_dtype"):
        with pytest.raises(RequestError, match=f"weight_dtype '{name}' is none"):
            _load(flux_file, source, weight_dtype=name)
    with pytest.raises(RequestError, match="where ComfyUI is"):
        load(ModelSpec(str(flux_file), "comfyui"), CPU)


def test_stages_of_a_module_whose_blocks_stay_together_are_refused(source, flux_file, monkeypatch):
    monkeypatch.setattr(table, "_WITHOUT_STAGES", frozenset({"Flux"}))
    part = ModelPart(stage_shares=(1.0, 1.0))
    with pytest.raises(RequestError, match="blocks of Flux over devices; set pipefusion_degree to 1"):
        load(ModelSpec(str(flux_file), "comfyui", comfyui=source), CPU, part)


def test_the_dtype_of_unlike_cards_is_decided_by_the_least_of_them(source, monkeypatch):
    import comfy.model_management as management

    turing = torch.device("cuda:1")
    monkeypatch.setattr(management, "should_use_bf16", lambda device=None, *_, **__: device != turing)
    monkeypatch.setattr(management, "should_use_fp16", lambda device=None, *_, **__: True)
    of_flux = [torch.bfloat16, torch.float16, torch.float32]
    assert all(hasattr(management, name) for name in (*QUESTIONS, MEMORY))
    with agree_on_dtypes(management, [torch.device("cuda:0"), turing]):
        assert management.unet_dtype(supported_dtypes=of_flux) == torch.float16
        assert management.should_use_bf16(CPU)
        assert management.unet_manual_cast(torch.float16, torch.device("cuda:0"), of_flux) is None
    assert management.unet_dtype(supported_dtypes=of_flux) == torch.bfloat16


def test_weights_are_kept_alike_on_cards_of_unlike_sizes(source, monkeypatch):
    """If a card cannot multiply fp8, ComfyUI keeps fp8 weights only if 16-bit ones would not fit. Ranks that shard
    weights exchange bytes, so all need the same dtype."""
    import comfy.model_management as management

    sizes, small = [48 * 2**30, 24 * 2**30], torch.device("cuda:1")
    monkeypatch.setattr(management, "supports_fp8_compute", lambda device=None: False)
    monkeypatch.setattr(management, "should_use_bf16", lambda device=None, *_, **__: True)
    monkeypatch.setattr(management, "get_total_memory", lambda dev=None: sizes[0])
    cuda = FakeCuda(sizes=sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cuda.get_device_properties)

    def kept():
        return management.unet_dtype(
            model_params=14 * 10**9, supported_dtypes=[torch.bfloat16, torch.float32], weight_dtype=FP8
        )

    assert kept() == torch.bfloat16
    with agree_on_dtypes(management, [torch.device("cuda:0"), small]):
        assert kept() == FP8
        assert management.get_total_memory(CPU) == sizes[0]
    assert kept() == torch.bfloat16
