// Makes this pack's new nodes wide enough for their titles, and gives them one of ComfyUI's colours if the person chose
// none; it is never saved in a workflow. Also colours the pack's own link types: ComfyUI's palettes do not have them.
import { app } from "../../scripts/app.js";
import { addStyle } from "./lib/dom.js";

// The Python module that ComfyUI reports for the pack's nodes, from the folder of this file; no language changes it. Where a
// proxy serves ComfyUI in a folder of its own, the address is longer.
const PACK = `custom_nodes.${decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2))}`;
const WIDTH = { title: 70, letter: 9 }; // pixels that a new node needs for its title to be read whole
const COLOR = "pale_blue"; // of ComfyUI's palette
const LINKS = { PARALLEL_STRATEGY: "#b5a642", PARALLEL_MODEL: "#5c7cfa" }; // unlike those of the stock types

// Makes the link colours permanent: each palette that a person chooses clears the colours of types that it does not have.
function keep(colours) {
  for (const [type, colour] of Object.entries(LINKS)) {
    Object.defineProperty(colours, type, { get: () => colour, set() {}, enumerable: true, configurable: true });
  }
}

app.registerExtension({
  name: "parallel_sampling.node_colors",

  setup() {
    for (const colours of [globalThis.LGraphCanvas?.link_type_colors, app.canvas.default_connection_color_byType]) {
      if (colours) keep(colours);
    }
    // Colours the slots that Vue draws.
    addStyle(`:root { ${Object.entries(LINKS).map(([type, colour]) => `--color-datatype-${type}: ${colour};`).join(" ")} }`);
  },

  nodeCreated(node) {
    if (node.constructor.nodeData?.python_module !== PACK) return;
    const width = WIDTH.title + WIDTH.letter * node.title.length;
    node.setSize([Math.max(node.size[0], width), node.size[1]]);
    const palette = globalThis.LGraphCanvas?.node_colors?.[COLOR];
    if (!palette || node.color || node.bgcolor) return;
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
