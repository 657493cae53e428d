"""The nodes of a prompt that use the ranks: once they have run, the ranks are idle until the next prompt."""

from types import ModuleType, SimpleNamespace

import pytest

from graphs import OURS, Graph
from pack_nodes import COMFYUIS_NODES, module_fixture

module = module_fixture("nodes.preload.tail")

TYPES = {
    "ParallelFluxLoader": ("PARALLEL_MODEL", "MODEL"),
    "ParallelDemoLoader": ("PARALLEL_MODEL", "MODEL", "CLIP", "VAE"),
    "ParallelModel": ("MODEL", "PARALLEL_MODEL"),
    "StrategySelector": ("PARALLEL_STRATEGY", "STRING"),
    "ParallelSampler": ("LATENT", "STRING"),
    "KSampler": ("LATENT",),
    "BasicGuider": ("GUIDER",),
    "SamplerCustomAdvanced": ("LATENT", "LATENT"),
    "VAEDecode": ("IMAGE",),
    "ParallelVAEDecode": ("IMAGE",),
    "UNETLoader": ("MODEL",),
    "CLIPLoader": ("CLIP",),
    "CLIPSetLastLayer": ("CLIP",),
    "CLIPTextEncode": ("CONDITIONING",),
}


@pytest.fixture
def tail(module, monkeypatch):
    """The module among node classes that have only the types of their outputs."""
    classes = {name: SimpleNamespace(RETURN_TYPES=types) for name, types in TYPES.items()}
    monkeypatch.setattr(COMFYUIS_NODES, "NODE_CLASS_MAPPINGS", classes, raising=False)
    return module


def _on_ranks(tail: ModuleType, graph: Graph, *outputs: str) -> set[str]:
    return {graph.prompt[node]["class_type"] for node in tail.nodes_on_ranks(graph.prompt, outputs)}


def _picture(graph: Graph, latent: list, decode: str = "VAEDecode", vae: list | None = None) -> str:
    image = [graph.add(decode, samples=latent, vae=vae or [graph.add("VAELoader"), 0]), 0]
    return graph.add("SaveImage", images=image)


def test_texts_of_an_encoder_of_theirs_are_on_them_past_what_changes_it(tail):
    graph = Graph()
    clip = [graph.add("ParallelCLIP", clip=[graph.add("CLIPLoader"), 0]), 0]
    skipped = [graph.add("CLIPSetLastLayer", clip=clip), 0]
    texts = [[graph.add("CLIPTextEncode", clip=one), 0] for one in (clip, skipped)]
    latent = graph.ksampler([graph.add("UNETLoader"), 0], *texts, graph.latent())
    names = {"ParallelCLIP", "CLIPSetLastLayer", "CLIPTextEncode"}
    assert _on_ranks(tail, graph, _picture(graph, latent)) == names and not tail.loaders(
        graph.prompt, [latent[0]]
    )


def test_models_go_on_through_links_of_any_type_and_the_demo_s_text_and_pictures_do_not(tail):
    graph = Graph()
    loader = graph.add("ParallelDemoLoader")
    text = [graph.add("CLIPTextEncode", clip=[loader, 2]), 0]
    wrapped = [graph.add("PipeOfSomePack", model=[loader, 1], positive=text), 0]
    guider = [graph.add("BasicGuider", model=wrapped, conditioning=text), 0]
    latent = [graph.add("SamplerCustomAdvanced", guider=guider, latent_image=graph.latent()), 0]
    names = _on_ranks(tail, graph, _picture(graph, latent, vae=[loader, 3]))
    assert names == {"ParallelDemoLoader", "PipeOfSomePack", "BasicGuider", "SamplerCustomAdvanced"}
    assert tail.loaders(graph.prompt, [graph.add("PreviewAny", source=latent)]) == [loader]


def test_a_loader_of_which_only_the_text_encoder_is_used_is_not_loaded_ahead(tail):
    graph = Graph()
    demo = graph.add("ParallelDemoLoader")
    text = [graph.add("CLIPTextEncode", clip=[demo, 2], text="a red circle"), 0]
    flux = graph.parallel_loader("a", "cpu:2")
    latent = graph.parallel_sampler(flux, text, text, graph.latent())
    assert tail.loaders(graph.prompt, [_picture(graph, latent, vae=[demo, 3])]) == [flux]


def test_the_tail_begins_when_no_node_on_the_ranks_will_run_also_where_comfyui_has_some_in_its_cache(tail):
    graph = Graph()
    loader = graph.parallel_loader("a", "cpu:2")
    first = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent())
    second = graph.parallel_sampler(loader, graph.text(1), graph.text(2), first)
    saved = _picture(graph, second)
    decode = graph.prompt[saved]["inputs"]["images"][0]
    on_ranks = tail.nodes_on_ranks(graph.prompt, [saved])

    def is_tail(begun: set[str], finished: set[str]) -> bool:
        return tail.in_tail(graph.prompt, on_ranks, begun, finished)

    assert not is_tail(set(), set()) and not is_tail(set(), {loader})
    assert not is_tail({first[0]}, {loader})
    assert not is_tail(set(), {loader, first[0]})  # between the two samplers
    assert not is_tail({second[0]}, {loader, first[0]})
    assert is_tail(set(), {loader, first[0], second[0]})
    assert is_tail({decode}, {second[0]})  # the loader and the first sampler were cached
    assert is_tail({decode}, set())  # all three were cached
    assert not is_tail({second[0]}, set())


def test_a_decode_on_the_ranks_is_no_tail_and_what_no_output_needs_is_not_waited_for(tail):
    graph = Graph()
    first = graph.model(OURS, "a")
    latent = graph.ksampler(first, graph.text(1), graph.text(2), graph.latent())
    unused = graph.ksampler(graph.model(OURS, "b"), graph.text(1), graph.text(2), latent)
    saved = _picture(graph, latent, "ParallelVAEDecode")
    found = tail.nodes_on_ranks(graph.prompt, [saved])
    assert unused[0] not in found and latent[0] in found
    assert _on_ranks(tail, graph, saved) == {"ParallelFluxLoader", "KSampler", "ParallelVAEDecode"}
    assert [graph.prompt[node]["inputs"]["unet_name"] for node in tail.loaders(graph.prompt, [saved])] == [
        "a"
    ]


@pytest.mark.parametrize("kind", ["KSampler", "NobodyKnowsIt"])
def test_a_prompt_of_stock_nodes_has_none(tail, kind):
    graph = Graph()
    latent = [graph.add(kind, model=[graph.add("UNETLoader", unet_name="a"), 0]), 0]
    assert _on_ranks(tail, graph, _picture(graph, latent)) == set()
