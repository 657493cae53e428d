"""Seconds of a prompt by phase, on one device and on two: text encoder, sampler, VAE.

    python benchmarks/whole_prompt.py [--rounds 5] [--json]

A device is one process with one thread. One device: stock ComfyUI. Two: Parallel CLIP with the encoder's layers on
both, Parallel Model with Ulysses 2, Parallel VAE Decode. Everything is warm. The ways take turns with several prompts
in a row, each with another text and seed. The seconds are medians. The models are random: an encoder of T5's kind, a
Flux, a video VAE of Wan 2.1's kind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from subject import finish, make_parser

from comfy_harness import Comfy, start_comfyui
from comfyui_client import ComfyUIClient
from graphs import STOCK, Graph

DEVICES = "cpu:2"
IN_A_ROW = 4  # prompts of one way in a row: ComfyUI keeps only the nodes of the latest prompt
PHASES = {"text": "CLIPTextEncode", "sampling": "KSampler", "decode": ("VAEDecode", "ParallelVAEDecode")}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = _measure(Path(folder), args.rounds)
    medians = {
        way: {phase: round(median(one[phase] for one in found), 3) for phase in found[0]}
        for way, found in times.items()
    }
    for phase in medians["one"]:
        one, two = (medians[way][phase] for way in ("one", "two"))
        print(f"{phase}: {one:.3f} s on one device, {two:.3f} s on two: {one / two:.2f} times as fast")
    finish(medians, args.json)


def _measure(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns each way's seconds by phase for each prompt except the first ones in a row, which load."""
    found: dict[str, list[dict[str, float]]] = {"one": [], "two": []}
    with start_comfyui(folder) as server:
        comfy = Comfy(server)
        unet = comfy.write_flux("whole_prompt.safetensors", heads=4, double_blocks=2, single_blocks=4)
        for number in range(rounds):
            for way, seconds in found.items():
                prompts = [
                    _prompt(unet, way == "two", number * IN_A_ROW + one).prompt for one in range(IN_A_ROW)
                ]
                seconds += [_phases(comfy.client, prompt) for prompt in prompts][1:]
    return found


def _phases(client: ComfyUIClient, prompt: dict) -> dict[str, float]:
    """Runs the prompt and returns the seconds of each phase."""
    with client.listen() as events:
        client.run(prompt, timeout=600)
    begun = [
        (time, message["data"]["node"])
        for time, message in zip(events.times, events.messages, strict=True)
        if message["type"] == "executing"
    ]
    ends = [time for time, _ in begun[1:]]
    taken = [(prompt[node]["class_type"], end - time) for (time, node), end in zip(begun, ends, strict=False)]
    phases = {
        phase: sum(seconds for kind, seconds in taken if kind in kinds) for phase, kinds in PHASES.items()
    }
    return phases | {"whole prompt": begun[-1][0] - begun[0][0]}


def _prompt(unet: str, on_two: bool, number: int) -> Graph:
    graph = Graph()
    # Each way has its own encoder. Otherwise stock's loading and ours would take turns with one encoder's weights.
    encoder = {"clip_name": f"whole_prompt_{on_two}.safetensors", "draw": int(on_two)}
    clip = [graph.add("TestEncoder", kind="t5", scale=16, **encoder), 0]
    model, vae = graph.model(STOCK, unet), [graph.add("TestWanVAE", channels=3), 0]
    size = {"width": 12, "height": 12, "channels": 16, "frames": 3, "batch": 1}
    video = [graph.add("TestLatent", draw=number, batch_index="", noise_mask=False, **size), 0]
    decode, devices = "VAEDecode", {}
    if on_two:
        strategy = graph.strategy(DEVICES, ulysses=2)
        clip = [graph.add("ParallelCLIP", clip=clip, placement="all devices", strategy=strategy), 0]
        model = [graph.add("ParallelModel", model=model, strategy=strategy), 0]
        decode, devices = "ParallelVAEDecode", {"strategy": strategy}
    text = [graph.add("CLIPTextEncode", clip=clip, text=f"a photo of house number {number}"), 0]
    graph.save(text, "text.safetensors")
    latent = graph.ksampler(model, graph.text(1), graph.text(2), graph.latent(64, 64), seed=number, steps=4)
    graph.save(latent, "latent.safetensors")
    image = [graph.add(decode, samples=video, vae=vae, **devices), 0]
    graph.save(image, "video.safetensors")
    return graph


if __name__ == "__main__":
    main()
