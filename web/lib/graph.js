// Finds nodes in the graph: by execution id, by class, or through the links of another node.
import { app } from "../../../scripts/app.js";

// Returns the graph that contains all subgraphs; older versions of ComfyUI's page have only one graph.
export const rootGraph = () => app.rootGraph ?? app.graph;

// Returns the node of an execution id, or null. "12:3" is node 3 inside the subgraph node 12. In the outputs that ComfyUI
// stores, an id begins with the id of the subgraph itself instead.
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

// Returns the node at the other end of an input's link, past reroutes; null for a node that is not in a graph yet.
export function originOf(node, inputName) {
  const slot = (node?.graph && node.inputs?.findIndex((input) => input.name === inputName)) ?? -1;
  let at = slot < 0 ? null : node.getInputNode(slot);
  for (let steps = 0; isReroute(at) && steps < 100; steps++) at = at.getInputNode(0);
  return at;
}

// Returns the nodes at the other ends of an output's links, past reroutes.
export function followersOf(node, outputName) {
  const slot = node?.outputs?.findIndex((output) => output.name === outputName) ?? -1;
  return slot < 0 ? [] : pastReroutes(node.getOutputNodes(slot) ?? [], 0);
}

function pastReroutes(nodes, depth) {
  return depth > 100 ? [] : nodes.flatMap((n) => (isReroute(n) ? pastReroutes(n.getOutputNodes(0) ?? [], depth + 1) : [n]));
}

export const SAMPLER = "ParallelSampler";
export const COMPARE = "CompareWithOneDevice";
export const LOADERS = ["ParallelModel", "ParallelModelLoader", "ParallelFluxLoader", "ParallelDemoLoader"];
const CARRIES = ["MODEL", "PARALLEL_MODEL", "GUIDER"]; // links that a parallel model comes over

// Returns the node that makes this node's model parallel: itself or one before it. Null if there is none.
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

// Returns the loader whose MODEL comes into this node, past nodes that change the model. Null if `model` has no link.
export function sourceOf(node) {
  let at = null;
  for (let next = originOf(node, "model"), steps = 0; next && steps < 100; next = originOf(at, "model"), steps++) at = next;
  return at;
}

export const isLinked = (node, inputName) => Boolean(node.inputs?.some(({ name, link }) => name === inputName && link != null));

// Returns the value of an input that a Primitive node gives; undefined without a link, or if another node must run first.
export function valueAt(node, inputName) {
  const origin = originOf(node, inputName);
  return /^Primitive/.test(origin?.type ?? "") ? origin.widgets?.[0]?.value : undefined;
}

// Returns all nodes of a class, including those in subgraphs.
export function nodesOf(comfyClass, graph = rootGraph()) {
  return (graph?.nodes ?? []).flatMap((node) => [
    ...(node.comfyClass === comfyClass ? [node] : []),
    ...(node.subgraph ? nodesOf(comfyClass, node.subgraph) : []),
  ]);
}

// Ends a step of undo: records the changes since the last one.
export function captureState() {
  const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker);
}
