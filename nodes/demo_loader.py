"""ParallelDemoLoader: a node that gives the tiny demo model, its CLIP and its VAE as ordinary ComfyUI objects."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch
from comfy.taesd.taesd import TAESD
from comfy_api.latest import io
from torch import Tensor, nn

from ..parallel_backend.errors import CheckpointError
from ..parallel_backend.models.demo.image_coder import CHANNELS, RGB_BIAS, RGB_FACTORS, DemoImageCoder
from ..parallel_backend.models.demo.text_encoder import DemoTextEncoder, tokenize
from ..parallel_backend.planner.rules import StrategySettings
from .host.settings import fingerprint
from .links import CATEGORY, check_links, parallel_model_output, refuse_literals, strategy_input
from .loaders import over_file
from .model.named_file import DEMO_MODEL, demo_spec

FOLDER = DEMO_MODEL.parent


class ParallelDemoLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelDemoLoader",
            display_name="Parallel Demo Loader",
            category=CATEGORY,
            description="A tiny Flux model that draws coloured shapes, to try the pack without a download. It knows "
            "captions such as 'a red circle left of a blue square'; images are 128 x 128.",
            search_aliases=["demo", "example model", "try", "multi gpu demo"],
            inputs=[
                strategy_input(),
            ],
            outputs=[
                parallel_model_output(),
                io.Model.Output("model", tooltip="An ordinary MODEL for KSampler and other stock nodes."),
                io.Clip.Output("clip", tooltip="For CLIPTextEncode."),
                io.Vae.Output("vae", tooltip="For VAEDecode and VAEEncode."),
            ],
        )

    validate_inputs = refuse_literals("strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(cls, strategy: StrategySettings | None = None) -> io.NodeOutput:
        check_links(strategy=strategy)
        missing = [n for n in (DEMO_MODEL.name, "image_coder.safetensors") if not (FOLDER / n).is_file()]
        if missing:
            raise CheckpointError(
                f"The demo model is incomplete: {', '.join(missing)} is missing from {FOLDER.name}; install the pack "
                f"again."
            )
        parallel = over_file(demo_spec(), strategy)
        # Previews show the colours of the demo's image coder. No other model has this latent format object.
        latents = parallel.model.latent_format
        latents.latent_rgb_factors = [list(factors) for factors in RGB_FACTORS]
        latents.latent_rgb_factors_bias = list(RGB_BIAS)
        latents.taesd_decoder_name = None  # the format's TAESD decoder cannot decode the demo's latents
        kinds = SimpleNamespace(clip=lambda **_: _TextModel(), tokenizer=lambda **_: _Tokenizer(), params={})
        clip = comfy.sd.CLIP(kinds)
        return io.NodeOutput(parallel, parallel, clip, make_vae())


def make_vae() -> comfy.sd.VAE:
    """Returns a real VAE object around the demo's image coder.

    ComfyUI picks a VAE's architecture by its keys. The keys of its TAESD give a VAE of the right channels and sizes,
    whose network is then replaced.
    """
    vae = comfy.sd.VAE(sd=TAESD(latent_channels=CHANNELS).state_dict(), dtype=torch.float32)
    coder = DemoImageCoder().eval().requires_grad_(False)
    coder.load_state_dict(
        comfy.utils.load_torch_file(str(FOLDER / "image_coder.safetensors"), safe_load=True)
    )
    vae.first_stage_model = coder
    vae.patcher = comfy.model_patcher.ModelPatcher(
        coder, load_device=vae.device, offload_device=vae.patcher.offload_device
    )
    # A megabyte of weights: always loaded whole, and measured again for the new network.
    vae.disable_offload = True
    vae.size = None
    # Widest activations of DemoImageCoder: floats per latent position, and per pixel.
    vae.memory_used_decode = lambda shape, dtype: 800 * shape[2] * shape[3] * dtype.itemsize
    vae.memory_used_encode = lambda shape, dtype: 10 * shape[2] * shape[3] * dtype.itemsize
    return vae


class _Tokenizer:
    """ComfyUI's tokenizer interface over the demo's word list: {Flux's encoder name: [[(word index, weight), …]]}.

    Flux has two text encoders, and CLIPTextEncodeFlux takes a text for each. Here clip_l gives the pooled vector and
    t5xxl the context.
    """

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: object
    ) -> dict[str, list]:
        words = [(index, 1.0) for index in tokenize(text)]
        if return_word_ids:
            words = [(*word, place) for place, word in enumerate(words)]
        return {"clip_l": [words], "t5xxl": [list(words)]}

    def state_dict(self) -> dict:
        return {}


class _TextModel(nn.Module):
    """ComfyUI's text model interface over DemoTextEncoder, which has no trained weights and is always float32."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = DemoTextEncoder()
        # ComfyUI moves and measures models by their parameters.
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.dtypes = {torch.float32}
        self.disable_offload = True

    def reset_clip_options(self) -> None:
        pass

    def set_clip_options(self, options: dict) -> None:
        pass

    def encode_token_weights(self, tokens: dict[str, list]) -> tuple[Tensor, Tensor]:
        context, _ = self.encoder(self._indices(tokens["t5xxl"]))
        _, pooled = self.encoder(self._indices(tokens["clip_l"]))
        return context.cpu(), pooled.cpu()

    def _indices(self, batches: list[list[tuple]]) -> Tensor:
        """Returns the word indices [1, TOKENS] int64."""
        (words,) = batches
        return torch.tensor([[word[0] for word in words]], device=self.encoder.words.device)

    def load_sd(self, state_dict: dict[str, Tensor]) -> tuple[list[str], list[str]]:
        return self.load_state_dict(state_dict, strict=False)
