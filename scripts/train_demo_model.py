"""Trains the demo model from nothing: drawings, an image coder, and a Flux transformer on generated captions.

    python scripts/train_demo_model.py --minutes 40 --output demo_model
    python scripts/train_demo_model.py --evaluate-only --output demo_model

Writes transformer.safetensors (original Flux key layout, bf16), image_coder.safetensors, evaluation.json and, with
--sheet FILE.jpg, a contact sheet of captions that training never saw.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo_training.drawing import SIZE, draw  # noqa: E402
from demo_training.judge import judge  # noqa: E402
from demo_training.scenes import RELATIONS, Scene, random_scene  # noqa: E402
from parallel_backend.models.demo.image_coder import CHANNELS, DOWNSCALE, SCALE, SHIFT, DemoImageCoder  # noqa: E402
from parallel_backend.models.demo.text_encoder import CONTEXT_DIM, POOLED_DIM, DemoTextEncoder, tokenize  # noqa: E402
from parallel_backend.models.diffusers.adapter import image_ids, pack, unpack  # noqa: E402
from parallel_backend.models.diffusers.keys import FluxDims, diffusers_sources, original_shapes  # noqa: E402

DIMS = FluxDims(
    hidden=256,
    heads=2,
    head_dim=128,
    mlp=1024,
    double_blocks=1,
    single_blocks=4,
    context_dim=CONTEXT_DIM,
    pooled_dim=POOLED_DIM,
    in_channels=CHANNELS * 4,
    out_channels=CHANNELS * 4,
    guidance=False,
)
SIDE = SIZE // DOWNSCALE
EMPTY_PROMPT_SHARE = 0.1  # share of captions that are dropped, so that CFG has something to push away from
EVALUATION_STEPS, EVALUATION_CFG = 20, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40, help="processor minutes per thread")
    parser.add_argument("--output", type=Path, default=ROOT / "demo_model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--captions", type=int, default=200, help="held-out captions to judge")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of held-out captions here (JPEG)")
    parser.add_argument("--resume", action="store_true", help="go on from the files in --output")
    parser.add_argument("--evaluate-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.evaluate_only or args.resume:
        coder = DemoImageCoder().eval()
        coder.load_state_dict(load_file(args.output / "image_coder.safetensors"))
    else:
        coder = train_coder(random.Random(1), steps=1200)
        sharpen_decoder(coder, random.Random(11), steps=6500)
        save_file(coder.state_dict(), args.output / "image_coder.safetensors")
    if not args.evaluate_only:
        train_transformer(coder, random.Random(2 + args.resume), args)
    evaluate(coder, args)


def images(scenes: list[Scene], rng: random.Random) -> Tensor:
    """Draws the scenes as [B, 3, SIZE, SIZE] in -1..1."""
    return torch.stack([draw(scene, rng) for scene in scenes]) * 2 - 1


def train_coder(rng: random.Random, steps: int) -> DemoImageCoder:
    """Trains encoder and decoder on mean absolute plus square error; noise on latents makes the decoder forgiving."""
    coder = DemoImageCoder().train()
    optimizer = torch.optim.AdamW(coder.parameters(), lr=2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = images([random_scene(rng) for _ in range(24)], rng)
        with torch.autocast("cpu", torch.bfloat16):
            latent = coder.norm(coder.encoder(batch))
            decoded = coder.decoder(latent + 0.1 * torch.randn_like(latent))
        loss = F.l1_loss(decoded.float(), batch) + F.mse_loss(decoded.float(), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step + 1 == steps:
            print(f"coder step {step} loss {loss.item():.4f}", flush=True)
    return coder.eval()


def sharpen_decoder(coder: DemoImageCoder, rng: random.Random, steps: int) -> None:
    """Trains the decoder alone, for longer: latents stay the same, edges get crisp, even for slightly wrong latents."""
    coder.requires_grad_(False)
    decoder = coder.decoder.requires_grad_(True).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.02)
    for step in range(steps):
        batch = images([random_scene(rng) for _ in range(24)], rng)
        with torch.no_grad():
            latent = (coder.encode(batch) - SHIFT) * SCALE
            latent += 0.15 * torch.rand(len(batch), 1, 1, 1) * torch.randn_like(latent)
        with torch.autocast("cpu", torch.bfloat16):
            decoded = decoder(latent.contiguous(memory_format=torch.channels_last)).float()
        loss = F.l1_loss(decoded, batch) + F.mse_loss(decoded, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 500 == 0 or step + 1 == steps:
            print(f"decoder step {step} loss {loss.item():.4f}", flush=True)
    coder.to(memory_format=torch.contiguous_format).requires_grad_(False)


def train_transformer(coder: DemoImageCoder, rng: random.Random, args: argparse.Namespace) -> None:
    """Trains by rectified flow: x = (1 - sigma) x0 + sigma noise, target noise - x0; saves the average every minute."""
    path = args.output / "transformer.safetensors"
    model, average, text = new_transformer(), new_transformer(), DemoTextEncoder()
    if args.resume:
        model.load_state_dict(load_transformer(path).state_dict())
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.01)
    generator = torch.Generator().manual_seed(3)
    # Processor time, so that a busy machine trains as much as an idle one.
    begun, saved, step, running = time.process_time(), 0.0, 0, None
    while (elapsed := (time.process_time() - begun) / 60 / args.threads) < args.minutes:
        progress = elapsed / args.minutes
        for group in optimizer.param_groups:
            group["lr"] = (
                1.2e-3 * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * math.cos(progress * math.pi / 2) ** 2)
            )
        scenes = [random_scene(rng) for _ in range(args.batch)]
        with torch.inference_mode():
            latent = (coder.encode(images(scenes, rng)) - SHIFT) * SCALE
        captions = ["" if rng.random() < EMPTY_PROMPT_SHARE else scene.caption for scene in scenes]
        noise = torch.randn(latent.shape, generator=generator)
        # Half uniform, half towards noise, because the noisy steps decide what goes where.
        sigma = torch.rand(args.batch, generator=generator)
        sigma[::2] = sigma[::2].sqrt()
        mix = sigma.view(-1, 1, 1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = predict(model, text, (1 - mix) * latent + mix * noise, sigma, captions)
        loss = F.mse_loss(velocity.float(), noise - latent)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.998, (step + 1) / (step + 10))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        step += 1
        if elapsed - saved >= 1:
            saved = elapsed
            save_transformer(average, path)
            print(
                f"{elapsed:5.1f} min, step {step}, {step * args.batch} images, loss {running:.4f}", flush=True
            )
    save_transformer(average, path)


def new_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=DIMS.in_channels,
        num_layers=DIMS.double_blocks,
        num_single_layers=DIMS.single_blocks,
        num_attention_heads=DIMS.heads,
        attention_head_dim=DIMS.head_dim,
        joint_attention_dim=DIMS.context_dim,
        pooled_projection_dim=DIMS.pooled_dim,
        guidance_embeds=DIMS.guidance,
    )


def predict(model, text, x: Tensor, sigma: Tensor, captions: list[str]) -> Tensor:
    """Returns the velocity [B, 16, h, w] of x [B, 16, h, w] at sigma [B]."""
    context, pooled = text(torch.tensor([tokenize(caption) for caption in captions]))
    height, width = x.shape[-2:]
    (tokens,) = model(
        hidden_states=pack(x),
        encoder_hidden_states=context,
        pooled_projections=pooled,
        timestep=sigma,
        img_ids=image_ids(height, width),
        txt_ids=torch.zeros(context.shape[1], 3),
        return_dict=False,
    )
    return unpack(tokens, height, width)


def save_transformer(model: FluxTransformer2DModel, path: Path) -> None:
    """Saves the model in the original key layout and bf16: the inverse of `diffusers_sources`."""
    state = model.state_dict()
    shapes = original_shapes(DIMS)
    originals = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    for name, (key, rows) in diffusers_sources(DIMS).items():
        originals[key][rows] = halves_swapped(name, state[name].to(torch.bfloat16))
    save_file(originals, path)


def load_transformer(path: Path) -> FluxTransformer2DModel:
    """Loads the shipped file into diffusers' model, in float32."""
    stored = load_file(path)
    model = new_transformer()
    sources = diffusers_sources(DIMS).items()
    model.load_state_dict(
        {name: halves_swapped(name, stored[key][rows].float()) for name, (key, rows) in sources}
    )
    return model.eval()


def halves_swapped(name: str, value: Tensor) -> Tensor:
    """Swaps the halves of the last modulation only: the original has (shift, scale), diffusers has (scale, shift)."""
    return torch.cat(value.chunk(2, dim=0)[::-1]) if name.startswith("norm_out.linear.") else value


@torch.inference_mode()
def sample(model, coder, captions: list[str], seed: int) -> Tensor:
    """Samples images [B, 3, SIZE, SIZE] in 0..1: Euler over evenly spaced sigmas, with CFG against the empty prompt."""
    text = DemoTextEncoder()
    x = torch.randn(len(captions), CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    sigmas = torch.linspace(1, 0, EVALUATION_STEPS + 1)
    for sigma, following in pairwise(sigmas):
        line = sigma.expand(len(captions))
        cond = predict(model, text, x, line, captions)
        uncond = predict(model, text, x, line, [""] * len(captions))
        x = x + (following - sigma) * (uncond + EVALUATION_CFG * (cond - uncond))
    return (coder.decode(x / SCALE + SHIFT) / 2 + 0.5).clamp(0, 1)


def evaluate(coder: DemoImageCoder, args: argparse.Namespace) -> None:
    """Counts the right pictures for held-out captions and for trained ones. Captions and seeds are fixed."""
    model = load_transformer(args.output / "transformer.safetensors")
    report = {"steps": EVALUATION_STEPS, "cfg": EVALUATION_CFG}
    for name, held_out in (("held_out", True), ("trained", False)):
        rng = random.Random(4)
        scenes = [random_scene(rng, held_out) for _ in range(args.captions)]
        pictures = torch.cat(
            [
                sample(model, coder, [s.caption for s in scenes[i : i + 50]], seed=i)
                for i in range(0, len(scenes), 50)
            ]
        )
        verdicts = [judge(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
        counts = {key: sum(asdict(v)[key] for v in verdicts) for key in ("colours", "shapes", "relation")}
        report[name] = {"captions": len(scenes), "right": sum(v.right for v in verdicts), **counts}
        if held_out:
            report["held_out_by_relation"] = {
                relation: {
                    "captions": sum(s.relation == relation for s in scenes),
                    "right": sum(
                        v.right for s, v in zip(scenes, verdicts, strict=True) if s.relation == relation
                    ),
                }
                for relation in RELATIONS
            }
        if held_out and args.sheet:
            contact_sheet(pictures, scenes, verdicts, args.sheet)
    (args.output / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def contact_sheet(pictures, scenes, verdicts, path: Path, columns: int = 6, rows: int = 5) -> None:
    """Draws the pictures of the first held-out captions in order, right or wrong, each with its verdict."""
    from PIL import Image, ImageDraw

    line = 30
    sheet = Image.new("RGB", (columns * (SIZE + 8), rows * (SIZE + line + 8)), "white")
    pen = ImageDraw.Draw(sheet)
    for n in range(min(columns * rows, len(scenes))):
        x, y = (n % columns) * (SIZE + 8) + 4, (n // columns) * (SIZE + line + 8) + 4
        pixels = (pictures[n] * 255).round().byte().permute(1, 2, 0).numpy()
        sheet.paste(Image.fromarray(pixels), (x, y))
        first, _, second = scenes[n].caption.partition(f" {scenes[n].relation} ")
        mark = "right" if verdicts[n].right else "WRONG"
        pen.text((x, y + SIZE + 2), f"{first}\n{scenes[n].relation} {second}", fill="black", font_size=9)
        colour = "green" if verdicts[n].right else "red"
        pen.text((x + SIZE, y + SIZE + 2), mark, fill=colour, font_size=9, anchor="ra")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=88)


if __name__ == "__main__":
    main()
