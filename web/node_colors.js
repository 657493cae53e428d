// One colour for this pack's nodes where a person chose none: one of ComfyUI's own, and never written into a workflow.
import { app } from "../../scripts/app.js";

const CATEGORY = "parallel";
const COLOR = "pale_blue"; // of ComfyUI's palette

app.registerExtension({
  name: "parallel_sampling.node_colors",

  nodeCreated(node) {
    const palette = globalThis.LGraphCanvas?.node_colors?.[COLOR];
    if (node.constructor.nodeData?.category !== CATEGORY || !palette || node.color || node.bgcolor) return;
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
