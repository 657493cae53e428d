"""Nodes that others make while a prompt runs, as packs of loops do."""

from __future__ import annotations

from comfy_api.latest import io
from comfy_execution.graph_utils import GraphBuilder

from .category import CATEGORY


class TestTwice(io.ComfyNode):
    """Samples, and what came of that once more, by two nodes of a sampler's class."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestTwice",
            category=CATEGORY,
            inputs=[
                io.String.Input("sampler", tooltip="KSampler, or ParallelSampler"),
                io.AnyType.Input("model"),
                io.Conditioning.Input("prompt"),
                io.Latent.Input("latent"),
            ],
            outputs=[io.Latent.Output()],
            enable_expand=True,
        )

    @classmethod
    def execute(cls, sampler, model, prompt, latent) -> io.NodeOutput:
        graph = GraphBuilder()
        settings = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 3}
        wired = {"positive": prompt, "negative": prompt, **settings}
        wired["parallel_model" if sampler == "ParallelSampler" else "model"] = model
        for denoise in (1.0, 0.5):
            latent = graph.node(sampler, latent_image=latent, denoise=denoise, **wired).out(0)
        return io.NodeOutput(latent, expand=graph.finalize())
