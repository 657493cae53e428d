// One colour for this pack's nodes where a person chose none: one of ComfyUI's own, and never written into a workflow.
import { app } from "../../scripts/app.js";

// By which ComfyUI names the pack's nodes, in every language: the folder that this file comes from.
const PACK = `custom_nodes.${decodeURIComponent(new URL(import.meta.url).pathname.split("/")[2])}`;
const COLOR = "pale_blue"; // of ComfyUI's palette

app.registerExtension({
  name: "parallel_sampling.node_colors",

  nodeCreated(node) {
    const palette = globalThis.LGraphCanvas?.node_colors?.[COLOR];
    if (node.constructor.nodeData?.python_module !== PACK || !palette || node.color || node.bgcolor) return;
    const { color, bgcolor } = palette;
    Object.assign(node, { color, bgcolor });
    const before = node.onSerialize;
    node.onSerialize = function (saved) {
      before?.call(this, saved);
      if (saved.color === color && saved.bgcolor === bgcolor) {
        delete saved.color;
        delete saved.bgcolor;
      }
    };
  },
});
