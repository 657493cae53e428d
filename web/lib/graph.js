// Ways through the graph: which node an execution id means, which nodes a node is joined with.
import { app } from "../../../scripts/app.js";

// The graph that holds all others; older versions of ComfyUI's page have only one.
export const rootGraph = () => app.rootGraph ?? app.graph;

// Execution ids name the way through subgraphs: "12:3" is node 3 in the subgraph node 12. Where outputs are kept, an id
// begins with the subgraph's own instead.
export function nodeOf(id) {
  let graph = rootGraph();
  let node = null;
  for (const part of String(id).split(":")) {
    const subgraph = rootGraph()?.subgraphs?.get(part);
    node = subgraph ? null : (graph?.getNodeById(part) ?? graph?.getNodeById(Number(part)));
    graph = subgraph ?? node?.subgraph;
  }
  return node;
}

const isReroute = (node) => node?.type === "Reroute" || (node?.isVirtualNode && node.inputs?.length === 1);

// The node at the other end of an input's link, past reroutes.
export function originOf(node, inputName) {
  const slot = node?.inputs?.findIndex((input) => input.name === inputName) ?? -1;
  let at = slot < 0 ? null : node.getInputNode(slot);
  for (let steps = 0; isReroute(at) && steps < 100; steps++) at = at.getInputNode(0);
  return at;
}

// The nodes at the other ends of an output's links, past reroutes.
export function followersOf(node, outputName) {
  const slot = node?.outputs?.findIndex((output) => output.name === outputName) ?? -1;
  return slot < 0 ? [] : pastReroutes(node.getOutputNodes(slot) ?? [], 0);
}

function pastReroutes(nodes, depth) {
  return depth > 100 ? [] : nodes.flatMap((n) => (isReroute(n) ? pastReroutes(n.getOutputNodes(0) ?? [], depth + 1) : [n]));
}

const LOADERS = ["ParallelModel", "ParallelModelLoader", "ParallelFluxLoader", "ParallelDemoLoader"];
const CARRIES = ["MODEL", "PARALLEL_MODEL", "GUIDER"]; // links that a parallel model comes over

// The node that makes this node's model a parallel one: itself, or one before it.
export function loaderOf(node, seen = new Set()) {
  if (!node || seen.has(node)) return null;
  seen.add(node);
  if (LOADERS.includes(node.comfyClass)) return node;
  for (const { type, name, link } of node.inputs ?? []) {
    const found = CARRIES.includes(type) && link != null ? loaderOf(originOf(node, name), seen) : null;
    if (found) return found;
  }
  return null;
}

// The loader in front of a node that takes its MODEL, past those that change it.
export function sourceOf(node) {
  let at = null;
  for (let next = originOf(node, "model"), steps = 0; next && steps < 100; next = originOf(at, "model"), steps++) at = next;
  return at;
}

export const isLinked = (node, inputName) => Boolean(node.inputs?.some(({ name, link }) => name === inputName && link != null));

// What a linked input will be, where the node that gives it only holds a value; undefined where it has to run for that.
export function valueAt(node, inputName) {
  const origin = originOf(node, inputName);
  return /^Primitive/.test(origin?.type ?? "") ? origin.widgets?.[0]?.value : undefined;
}

// All nodes of a class, those in subgraphs too.
export function nodesOf(comfyClass, graph = rootGraph()) {
  return (graph?.nodes ?? []).flatMap((node) => [
    ...(node.comfyClass === comfyClass ? [node] : []),
    ...(node.subgraph ? nodesOf(comfyClass, node.subgraph) : []),
  ]);
}

// One step that undo takes back.
export function captureState() {
  const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker);
}
