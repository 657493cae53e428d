"""ComfyUI's entry point to the pack: gives it the node classes, and adds routes and listeners when ComfyUI starts.

Importing this file starts nothing and needs neither torch nor ComfyUI, because test runners and registry tools import
it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension, io

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

WEB_DIRECTORY = "./web"  # files of this pack that ComfyUI's page loads


async def comfy_entrypoint() -> ComfyExtension:
    """Returns the extension that lists the nodes; ComfyUI calls this once (V3 extensions)."""
    from comfy_api.latest import ComfyExtension

    from .nodes import NODES

    class ParallelSamplingExtension(ComfyExtension):
        async def on_load(self) -> None:
            from server import PromptServer

            from .nodes.host import prompt_links
            from .nodes.host.settings import price_per_gpu_hour
            from .nodes.job.replaced import note_values
            from .nodes.preload import route as preload
            from .nodes.routes import doctor, front_door, launch, ranks, strategy
            from .parallel_backend.observability.logs.event_log import begin_log

            note_values()
            server = PromptServer.instance
            for module in (doctor, ranks, strategy):
                module.add_routes(server.routes)
            for module in (front_door, launch, preload, prompt_links):
                module.begin(server)
            begin_log(price_per_gpu_hour)

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return list(NODES)

    return ParallelSamplingExtension()
