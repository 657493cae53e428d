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
            from .nodes.preload import route as preload
            from .nodes.routes import doctor as doctor_route
            from .nodes.routes import front_door, queue_log
            from .nodes.routes import launch as at_launch
            from .nodes.routes import metrics as metrics_route
            from .nodes.routes import ranks as rank_routes
            from .nodes.routes import runs as runs_route
            from .nodes.routes import strategy as strategy_route
            from .parallel_backend.observability.logs.event_log import begin_log

            doctor_route.add_route(PromptServer.instance.routes)
            rank_routes.add_routes(PromptServer.instance.routes)
            runs_route.add_route(PromptServer.instance.routes)
            strategy_route.add_routes(PromptServer.instance.routes)
            front_door.add_routes(PromptServer.instance)
            at_launch.begin(PromptServer.instance)
            preload.begin(PromptServer.instance)
            queue_log.begin(PromptServer.instance)
            prompt_links.begin(PromptServer.instance)
            metrics_route.add_route(PromptServer.instance.routes)
            begin_log(price=price_per_gpu_hour)

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return list(NODES)

    return ParallelSamplingExtension()
