// Exchanges the loaders of GGUF files that other packs have (ComfyUI-GGUF, and ComfyUI-MultiGPU around it) for Parallel Model
// Loader, and back. Their models do not say which file they are of, and the loaders read it into ComfyUI's process.
import { ACTIVE, exchange, graphs, linksOf, offersFile, slotOfType, widgetOf } from "./graph_changes.js";

const THEIRS = [
  "UnetLoaderGGUF", "UnetLoaderGGUFAdvanced", "UnetLoaderGGUFMultiGPU", "UnetLoaderGGUFAdvancedMultiGPU",
  "UnetLoaderGGUFDisTorch2MultiGPU", "UnetLoaderGGUFAdvancedDisTorch2MultiGPU",
];
const OURS = "ParallelModelLoader";
const MODEL = "MODEL";
const NAMES = { unet_name: "model_name" };
const BACK = { model_name: "unet_name" };
const REPLACED = "parallel_sampling_replaced"; // a property of our node, saved with it: {kind, values} of the old one

export const isGgufLoader = (node) => THEIRS.includes(node.comfyClass) && offersFile(OURS, "model_name", node, "unet_name");

export function exchangeLoader(graph, node) {
  const loader = exchange(graph, node, OURS, NAMES, [MODEL]);
  loader.properties[REPLACED] = { kind: node.comfyClass, values: (node.widgets ?? []).map(({ name, value }) => [name, value]) };
  return loader;
}

// Returns [graph, node] for each of our loaders in the place of another pack's, whose model goes only where a MODEL can.
export function exchangedLoaders() {
  const isTaken = (graph, node) => linksOf(graph, node, slotOfType(node, "PARALLEL_MODEL")).length > 0;
  return graphs().flatMap((graph) =>
    graph.nodes
      .filter((node) => node.comfyClass === OURS && node.mode === ACTIVE && node.properties[REPLACED] && !isTaken(graph, node))
      .filter((node) => globalThis.LiteGraph.registered_node_types[node.properties[REPLACED].kind])
      .map((node) => [graph, node]),
  );
}

export function exchangeBack(graph, node) {
  const { kind, values } = node.properties[REPLACED];
  const loader = exchange(graph, node, kind, BACK, [MODEL]);
  for (const [name, value] of values) {
    const widget = name in NAMES ? null : widgetOf(loader, name);
    if (widget) widget.value = value;
  }
}
