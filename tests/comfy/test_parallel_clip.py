"""Parallel CLIP in the real ComfyUI encodes as stock does, for every kind of encoder, on one device and on several."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from any_runs import compared
from comfyui_client import PromptFailed
from graphs import Graph
from waiting import wait_until

PLACEMENTS = ["one device", "all devices"]
KINDS = ["clip_l", "t5", "sdxl", "umt5", "qwen", "qwen3", "gemma", "llama"]
TEXT = "a photo of the (large:1.3) red cat near a [small] house, under the sky"
VOCABULARY = "a photo of the large small red blue cat dog house tree under over"
LORA = "encoder.safetensors"
_numbers = itertools.count()


class TextGraph(Graph):
    """Builds prompts that encode texts with random encoders, by stock and by Parallel CLIP."""

    def encoder(self, kind: str, draw: int = 0) -> list:
        name = f"tiny-{kind}-{draw}.safetensors"
        return [self.add("TestEncoder", kind=kind, clip_name=name, draw=draw), 0]

    def ours(self, clip: list, devices: str = "cpu:2", placement: str = "auto", **choice: str) -> list:
        strategy = self.strategy(devices, **choice)
        return [self.add("ParallelCLIP", clip=clip, placement=placement, strategy=strategy), 0]

    def text(self, clip: list, text: str = TEXT) -> list:
        return [self.add("CLIPTextEncode", clip=clip, text=text), 0]


@pytest.fixture(scope="module", autouse=True)
def files(comfy):
    """Writes a LoRA for CLIP-L, and a sentencepiece model of a few words: files of Gemma and UMT5 contain one."""
    generator, lora = torch.Generator().manual_seed(5), {}
    for layer in range(4):
        name = f"lora_te_text_model_encoder_layers_{layer}_mlp_fc1"
        lora[f"{name}.lora_up.weight"] = torch.randn(128, 4, generator=generator)
        lora[f"{name}.lora_down.weight"] = torch.randn(4, 64, generator=generator)
        lora[f"{name}.alpha"] = torch.tensor(4.0)
    save_file(lora, comfy.models("loras") / LORA)
    words, model = VOCABULARY.split(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i % 7 :: 1 + i % 5]) for i in range(200)]),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": 3},
    )
    (comfy.models("text_encoders") / "pieces.model").write_bytes(model.getvalue())
    yield
    (comfy.models("loras") / LORA).unlink()  # tests in other files use the first LoRA in the folder


def tensors(comfy, graph: Graph, *outputs: list) -> list[dict]:
    """Runs the prompt and returns the tensors of each output, by their place in it."""
    names = [f"test-tensors-{next(_numbers)}.safetensors" for _ in outputs]
    for output, name in zip(outputs, names, strict=True):
        graph.save(output, name)
    comfy.run(graph.prompt)
    return [load_file(comfy.output(name)) for name in names]


def difference(one: dict, other: dict) -> float:
    """Returns the largest difference over all tensors, each relative to the largest value of its tensor in `one`."""
    assert one and one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape and one[name].dtype == other[name].dtype for name in one)
    apart = [(one[name].float() - other[name].float()).abs().max() for name in one]
    sizes = [one[name].float().abs().max().clamp(min=1e-9) for name in one]
    return max(float(mine / size) for mine, size in zip(apart, sizes, strict=True))


# Three devices have unlike numbers of layers.
@pytest.mark.parametrize(("devices", "kind"), [*(("cpu:2", kind) for kind in KINDS), ("cpu:3", "t5")])
def test_the_text_is_that_of_stock_to_the_last_bit_on_one_device_and_near_it_on_all(comfy, devices, kind):
    graph = TextGraph()
    clip = graph.encoder(kind)
    clips = clip, graph.ours(clip, devices), graph.ours(clip, devices, "all devices")
    expected, one, every = tensors(comfy, graph, *map(graph.text, clips))
    assert difference(expected, one) == 0.0
    assert difference(expected, every) <= 1e-5


def _lora(graph: TextGraph, clip: list) -> list:
    return [graph.add("TestEncoderLora", clip=clip, lora_name=LORA, strength=0.7), 0]


def _skip(graph: TextGraph, clip: list) -> list:
    return [graph.add("CLIPSetLastLayer", clip=clip, stop_at_clip_layer=-2), 0]


def _written_into(graph: TextGraph, clip: list) -> list:
    return [graph.add("TestWrittenInto", clip=clip), 0]


def _hooked(graph: TextGraph, clip: list) -> list:
    strengths = {"strength_model": 1.0, "strength_clip": 1.0}
    hook = [graph.add("CreateHookLora", lora_name=LORA, **strengths), 0]
    first = [graph.add("CreateHookKeyframe", strength_mult=1.0, start_percent=0.0), 0]
    later = [graph.add("CreateHookKeyframe", strength_mult=0.25, start_percent=0.5, prev_hook_kf=first), 0]
    hook = [graph.add("SetHookKeyframes", hooks=hook, hook_kf=later), 0]
    return [graph.add("SetClipHooks", clip=clip, apply_to_conds=False, schedule_clip=True, hooks=hook), 0]


NODES = {"a LoRA": _lora, "CLIP skip": _skip, "a replaced method": _written_into, "scheduled hooks": _hooked}


@pytest.mark.parametrize("name", NODES)
def test_nodes_behind_it_do_as_they_do_to_stock(comfy, name):
    graph = TextGraph()
    # Each case has a separate encoder, because stock leaves the LoRAs of scheduled hooks in it.
    clip = graph.encoder("clip_l", draw=1 + list(NODES).index(name))
    ours = [graph.ours(clip, placement=placement) for placement in PLACEMENTS]
    plain = tensors(comfy, graph, *map(graph.text, ours))
    changed = [graph.text(NODES[name](graph, one)) for one in (clip, *ours)]
    expected, *found = tensors(comfy, graph, *changed)
    again = tensors(comfy, graph, *(graph.text(one, TEXT + " ") for one in ours))
    for before, amid, after in zip(plain, found, again, strict=True):
        assert difference(expected, amid) <= 1e-5
        assert difference(before, after) == 0.0  # the node's change leaves no trace
        if before.keys() == expected.keys():
            assert difference(before, expected) > 0.01


def test_a_layer_that_computes_by_another_ones_method_does_so_on_the_devices(comfy):
    def text(placement: str, undo: bool) -> dict:
        graph = TextGraph()  # of its own: a prompt runs all of its nodes
        clip = graph.encoder("clip_l", draw=77)
        clip = clip if placement == "stock" else graph.ours(clip, placement=placement)
        clip = [graph.add("TestOtherLayersMethod", clip=clip, undo=undo), 0]
        [found] = tensors(comfy, graph, graph.text(clip))
        return found

    before, changed, after = (text("stock", undo) for undo in (True, False, True))
    assert difference(before, changed) > 0.01 and difference(before, after) == 0.0
    for placement in PLACEMENTS:
        for undo, expected in ((True, before), (False, changed), (True, before)):
            assert difference(text(placement, undo), expected) <= 1e-5


@pytest.mark.parametrize("place", ["a closure", "an attribute of the encoder", "a random generator"])
def test_what_a_node_keeps_while_one_text_is_encoded_is_there_for_the_next(comfy, place):
    graph = TextGraph()
    clip = graph.encoder("clip_l", draw=60 + len(place))

    def text(one: list) -> list:
        return [graph.add("TestSecondText", clip=one, place=place), 0]

    [expected] = tensors(
        comfy, graph, text(clip)
    )  # first: what stock leaves on the encoder is no change of ours
    found = tensors(comfy, graph, *(text(graph.ours(clip, placement=one)) for one in PLACEMENTS))
    [forgetful] = tensors(comfy, graph, graph.text(clip, "a blue dog"))
    assert max(difference(expected, one) for one in found) <= 1e-5
    assert difference(forgetful, expected) > 0.01


def test_a_lora_is_in_an_encoder_on_which_stock_has_replaced_a_method_and_put_it_back(comfy):
    graph = TextGraph()
    clip = graph.encoder("clip_l", draw=51)
    [changed] = tensors(comfy, graph, graph.text(_written_into(graph, clip)))
    with_lora = [_lora(graph, one) for one in (clip, graph.ours(clip))]
    expected, found = tensors(comfy, graph, *map(graph.text, with_lora))
    assert difference(expected, found) <= 1e-5
    assert difference(changed, expected) > 0.01


def test_a_merge_with_the_same_encoder_takes_its_weights_without_the_last_calls_lora(comfy):
    graph = TextGraph()
    clip = graph.encoder("clip_l")
    clips = [clip, *(graph.ours(clip, placement=placement) for placement in PLACEMENTS)]
    with_lora = [_lora(graph, one) for one in clips]
    tensors(comfy, graph, *map(graph.text, with_lora))
    merged = [
        [graph.add("CLIPMergeSimple", clip1=one, clip2=other, ratio=0.4), 0]
        for one, other in zip(with_lora, clips, strict=True)
    ]
    expected, *found = tensors(comfy, graph, *map(graph.text, merged))
    assert max(difference(expected, one) for one in found) <= 1e-5


@pytest.mark.parametrize("name", ["a LoRA", "CLIP skip"])
def test_nodes_before_it_do_as_they_do_to_stock(comfy, name):
    graph = TextGraph()
    changed = NODES[name](graph, graph.encoder("clip_l"))
    expected, found = tensors(comfy, graph, graph.text(changed), graph.text(graph.ours(changed)))
    assert difference(expected, found) == 0.0


def test_an_embedding_is_read_as_by_stock(comfy):
    path = comfy.models("embeddings") / "tiny.safetensors"
    save_file({"emb_params": torch.randn(3, 64, generator=torch.Generator().manual_seed(2))}, path)
    graph = TextGraph()
    clip, words = graph.encoder("clip_l"), "a photo of embedding:tiny, a cat"
    ours = graph.ours(clip, placement="all devices")
    texts = graph.text(clip, "a photo of a cat"), graph.text(clip, words), graph.text(ours, words)
    plain, expected, found = tensors(comfy, graph, *texts)
    assert difference(expected, found) <= 1e-5
    assert difference(plain, expected) > 0.01


def test_pictures_and_sound_are_encoded_as_by_stock(comfy):
    graph = TextGraph()
    vision, hearing = [graph.add("TestVision"), 0], graph.add("TestHearing")
    image = [graph.add("TestImage", width=48, height=40, batch=1, channels=3), 0]

    def encoded(change=lambda encoder: encoder) -> tuple[list, list]:
        seen = graph.add("CLIPVisionEncode", clip_vision=change(vision), image=image, crop="center")
        heard = graph.add("AudioEncoderEncode", audio_encoder=change([hearing, 0]), audio=[hearing, 1])
        return [seen, 0], [heard, 0]

    ours = [
        link for way in PLACEMENTS for link in encoded(lambda one, way=way: graph.ours(one, placement=way))
    ]
    *stock, one_image, one_sound, all_image, all_sound = tensors(comfy, graph, *encoded(), *ours)
    for expected, found in zip(stock * 2, (one_image, one_sound, all_image, all_sound), strict=True):
        assert difference(expected, found) <= 1e-5


def test_a_language_model_writes_what_stock_writes(comfy):
    graph = TextGraph()
    clip = graph.encoder("qwen3")
    asked = {"prompt": "a red cat", "max_length": 6, "sampling_mode": "off"}
    clips = {"stock": clip} | {way: graph.ours(clip, placement=way) for way in PLACEMENTS}
    for name, one in clips.items():
        written = [graph.add("TextGenerate", clip=one, **asked), 0]
        graph.add("TestSaveText", text=written, path=f"written-{name}.txt")
    comfy.run(graph.prompt)
    stock, *ours = (comfy.output(f"written-{name}.txt").read_text() for name in clips)
    assert ours == [stock, stock] and stock


def test_a_whole_graph_gives_stocks_latent_and_its_report_tells_what_the_text_took(comfy):
    unet = comfy.write_flux("tiny_for_text.safetensors", context_dim=64, pooled_dim=64)
    graph = TextGraph()
    clip, latent = graph.encoder("clip_l"), graph.latent()
    stock, ours = (
        [graph.text(one, "a red cat"), graph.text(one, "blue"), latent]
        for one in (clip, graph.ours(clip, placement="all devices"))
    )
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    ways = {
        "stock": graph.ksampler(graph.model("stock", unet), *stock),
        "ours": graph.parallel_sampler(loader, *ours),
    }
    report = compared(comfy, graph, ways)["report"]
    assert re.search(r"this prompt on the devices: \S+ s so far: text .*, loading .*, sampling .*", report)


def test_comfyui_and_the_processes_map_the_loaders_file(comfy):
    """More than 90 % of the bytes of ComfyUI's own weights are views of the file, so there is no relevant copy."""
    file = "tiny-t5-7.safetensors"
    graph = TextGraph()
    ours = graph.ours(graph.encoder("t5", draw=7))
    graph.add("TestSaveText", text=[graph.add("TestMapped", clip=ours, file=file), 0], path="mapped.txt")
    tensors(comfy, graph, graph.text(ours, "a cat"))
    pids = [process.pid for process in comfy.ranks()]
    assert len(pids) == 2
    assert all(file in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    mapped, whole = map(int, comfy.output("mapped.txt").read_text().split())
    assert mapped > 0.9 * whole


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        (lambda graph: graph.ours(graph.encoder("clip_l")), "parallel already"),
        (lambda graph: [graph.add("TestTinyVAE"), 0], "takes a CLIP"),
    ],
    ids=["twice", "a VAE"],
)
def test_what_is_no_clip_is_refused_by_name(comfy, clip, words):
    graph = TextGraph()
    with pytest.raises(PromptFailed, match=words):
        tensors(comfy, graph, graph.text(graph.ours(clip(graph))))


def _texts_encoded(comfy) -> list[str | None]:
    """Returns the prompt id of each text that the devices have encoded, None for a text that was encoded ahead."""
    ended = (one for one in comfy.logged() if one["event"] == "ended")
    return [one["prompt_id"] for one in ended if one["request"] == "text"]


@pytest.mark.parametrize("changed", [_skip, _lora])
def test_the_texts_of_a_waiting_prompt_are_encoded_in_the_tail_of_the_one_before(comfy, changed):
    """The tail of each prompt lasts until the next one's texts are encoded, like the decode of a large picture."""
    texts = [f"a red cat under the tree number {number}" for number in range(3)]
    graph = TextGraph()
    clip = graph.encoder("clip_l", draw=41)
    other = changed(graph, clip)
    stock = tensors(comfy, graph, *(graph.text(one, text) for text in texts for one in (clip, other)))
    before, names, paths = len(_texts_encoded(comfy)), [], []
    for number, text in enumerate(texts):
        graph = TextGraph()
        clip = graph.ours(graph.encoder("clip_l", draw=41), "cpu:2", "all devices")
        found = [graph.text(clip, text), graph.text(changed(graph, clip), text)]
        both = graph.combined(*found)
        if number < 2:
            both = [graph.add("TestUntilEarly", conditioning=both, count=2), 0]
        graph.save(both, f"early-{number}-both.safetensors")
        for place, one in enumerate(found):
            paths.append(f"early-{number}-{place}.safetensors")
            graph.save(one, paths[-1])
        names.append(comfy.client.queue(graph.prompt))
    for name in names:
        assert comfy.client.wait(name)["status"]["status_str"] == "success"
    assert difference(stock[0], stock[2]) > 0.001 < difference(stock[0], stock[1])
    for path, expected in zip(paths, stock, strict=True):
        assert difference(load_file(comfy.output(path)), expected) <= 1e-5
    assert _texts_encoded(comfy)[before:] == [names[0]] * 2 + [None] * 4


def test_a_text_that_changes_what_a_node_keeps_is_not_encoded_ahead(comfy):
    texts = [f"a red cat near the house number {number}" for number in range(3)]

    def graphs(make_clip) -> list[tuple[TextGraph, list]]:
        made = []
        for text in texts:
            graph = TextGraph()
            clip = [graph.add("TestCounting", clip=make_clip(graph)), 0]
            made.append((graph, graph.text(clip, text)))
        return made

    stock = [tensors(comfy, graph, one)[0] for graph, one in graphs(lambda graph: graph.encoder("clip_l"))]
    before, names = len(_texts_encoded(comfy)), []
    for number, (graph, one) in enumerate(graphs(lambda graph: graph.ours(graph.encoder("clip_l")))):
        # The first prompt's tail lasts until a text was encoded ahead.
        last = [graph.add("TestUntilFile", conditioning=one, file="encoded-ahead"), 0] if not number else one
        graph.save(last, f"counting-{number}.safetensors")
        names.append(comfy.client.queue(graph.prompt))
    wait_until(lambda: None in _texts_encoded(comfy)[before:])
    comfy.output("encoded-ahead").touch()
    for name in names:
        assert comfy.client.wait(name)["status"]["status_str"] == "success"
    for number, expected in enumerate(stock):
        assert difference(load_file(comfy.output(f"counting-{number}.safetensors")), expected) <= 1e-5
    assert [one for one in _texts_encoded(comfy)[before:] if one] == names
