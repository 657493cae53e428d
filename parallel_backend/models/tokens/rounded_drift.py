"""The error that exchange_dtype fp8 adds to one call of a small model of each class, with random weights."""

from __future__ import annotations

# Root mean square of the error divided by that of the output, for (Ulysses 2, Ring 2), measured by
# benchmarks/exchange_drift.py.
DRIFT = {
    "AceStepConditionGenerationModel": (0.01, 0.0029),
    "Anima": (0.013, 0.0051),
    "AnimateWanModel": (0.0033, 0.00091),
    "BooguTransformer2DModel": (0.021, 0.013),
    "CameraWanModel": (0.0034, 0.00088),
    "Chroma": (0.014, 0.0051),
    "ChromaRadiance": (0.028, 0.0091),
    "CogVideoXTransformer3DModel": (0.0047, 0.0019),
    "ErnieImageModel": (0.0024, 0.00034),
    "Flux": (0.007, 0.0042),
    "HiDreamImageTransformer2DModel": (0.0074, 0.007),
    "HumoWanModel": (0.0043, 0.00093),
    "HunYuanDiT": (0.016, 0.0063),
    "HunYuanDiTPlain": (0.019, 0.0038),
    "Hunyuan3Dv2": (0.0058, 0.0014),
    "HunyuanVideo": (0.0052, 0.0018),
    "Ideogram4Transformer2DModel": (0.017, 0.0054),
    "JoyImageTransformer3DModel": (0.0055, 0.0029),
    "Kandinsky5": (0.012, 0.0026),
    "LTXAVModel": (0.0041, 0.00074),
    "LTXVModel": (0.0045, 0.00072),
    "LatentSeqMMFlowModel": (0.0049, 0.0012),
    "LensTransformer2DModel": (0.0048, 0.0015),
    "MMDiT": (0.00018, 9.7e-05),
    "MageFlowTransformer2DModel": (0.0052, 0.0014),
    "MiniMaxH3Model": (0.0034, 0.0017),
    "MiniTrainDIT": (0.012, 0.003),
    "NextDiT": (0.022, 0.012),
    "NextDiTPixelSpace": (0.0066, 0.0032),
    "OmniGen2Transformer2DModel": (0.018, 0.01),
    "OpenAISignatureMMDITWrapper": (0.0061, 0.0018),
    "PidNet": (0.0015, 0.00081),
    "PixArtMS": (0.0052, 0.00046),
    "PixDiT_T2I": (0.0013, 0.00071),
    "QwenImageTransformer2DModel": (0.0054, 0.003),
    "SCAIL2WanModel": (0.0024, 0.00072),
    "SCAILWanModel": (0.0031, 0.00067),
    "SingleStreamDiT": (0.028, 0.021),
    "VaceWanModel": (0.0033, 0.0011),
    "WanDancerModel": (0.0038, 0.00093),
    "WanModel": (0.0042, 0.0013),
    "WanModel_S2V": (0.0029, 0.00068),
}


def drift_in_words(class_name: str, *, over_a_ring: bool) -> str:
    """Returns a clause about the error of a call, or "" for a class that was not measured."""
    found = DRIFT.get(class_name)
    if found is None:
        return ""
    percent = f"{100 * found[over_a_ring]:.2g} %"
    return f"; a call of a small {class_name} was off by {percent} of its answer (root mean square)"
