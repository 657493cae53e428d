// Parallel Model behind every loader of the graph that does without, Parallel CLIP too where the user's settings say so, and out
// again: links and values stay as they are.
import { app } from "../../../scripts/app.js";
import { captureState, nodesOf, rootGraph } from "./graph.js";

const MODELS = { parallel: "ParallelModel", type: "MODEL" };
const ENCODERS = { parallel: "ParallelCLIP", type: "CLIP" };
const ENCODERS_TOO = "parallel_sampling.make_encoders_parallel";
const SLOT = 0; // of what both take and give
const FOR_SAMPLERS = 1; // of Parallel Model's other output
const OUTSIDE = -20; // what a link of a subgraph ends at that leaves it
export const ACTIVE = 0; // neither muted nor bypassed
export const GAP = 40; // pixels

export const graphs = () => [rootGraph(), ...(rootGraph()?.subgraphs?.values() ?? [])].filter(Boolean);
const isOurs = (node) => node.constructor.nodeData?.python_module === parallelModule();
const parallelModule = () => globalThis.LiteGraph.registered_node_types[MODELS.parallel]?.nodeData?.python_module;
const kinds = () => (app.extensionManager.setting.get(ENCODERS_TOO) ? [MODELS, ENCODERS] : [MODELS]);

export function linksOf(graph, node, slot) {
  return (node.outputs[slot]?.links ?? []).map((id) => graph.links.get?.(id) ?? graph.links[id]).filter(Boolean);
}

const slotsOf = (node, { type }) => node.outputs.flatMap((output, slot) => (output.type === type ? [slot] : []));

// Whether what this link carries comes to the parallel node of its kind, through whatever changes it on the way.
function becomesParallel(graph, link, kind, seen = new Set()) {
  if (seen.has(link)) return false;
  seen.add(link);
  if (Number(link.target_id) === OUTSIDE) {
    const instances = graphs().flatMap((g) => g.nodes.filter((n) => n.subgraph === graph).map((n) => [g, n]));
    return instances.some(([g, n]) => linksOf(g, n, link.target_slot).some((l) => becomesParallel(g, l, kind, seen)));
  }
  const target = graph.getNodeById(link.target_id);
  if (!target) return false;
  if (target.comfyClass === kind.parallel || (target.subgraph && nodesOf(kind.parallel, target.subgraph).length)) return true;
  return slotsOf(target, kind).some((slot) => linksOf(graph, target, slot).some((l) => becomesParallel(graph, l, kind, seen)));
}

// [graph, loader, slot, links] of each of a kind that nothing makes parallel: those that a node gives which takes none.
function stockOf(kind) {
  return graphs().flatMap((graph) =>
    graph.nodes
      .filter((node) => node.mode === ACTIVE && !node.subgraph && !isOurs(node))
      .filter((node) => !node.inputs?.some(({ type }) => type === kind.type) && node.outputs)
      .flatMap((node) => slotsOf(node, kind).map((slot) => [graph, node, slot]))
      .map(([graph, node, slot]) => [graph, node, slot, linksOf(graph, node, slot)])
      .map(([graph, node, slot, links]) => [graph, node, slot, links.filter((link) => !becomesParallel(graph, link, kind))])
      .filter(([, , , links]) => links.length),
  );
}

const parallelNodes = () =>
  graphs().flatMap((graph) =>
    graph.nodes
      .filter(({ comfyClass }) => [MODELS.parallel, ENCODERS.parallel].includes(comfyClass))
      .map((node) => [graph, node]),
  );
const isNeeded = (node) => Boolean(node.outputs[FOR_SAMPLERS]?.links?.length);

// Gives a link's end to another node.
export function move(graph, link, origin, slot) {
  if (Number(link.target_id) === OUTSIDE) graph.outputs[link.target_slot].connect(origin.outputs[slot], origin);
  else origin.connect(slot, graph.getNodeById(link.target_id), link.target_slot, link.parentId);
}

// The first free place at or below `pos`.
export function freePlace(graph, [x, top], [width, height], title) {
  let y = top + title;
  for (let tries = 0; tries < 100; tries++) {
    const over = graph.nodes.find(
      (node) =>
        node.pos[0] < x + width + GAP / 2 &&
        node.pos[0] + node.size[0] + GAP / 2 > x &&
        node.pos[1] - title < y + height &&
        node.pos[1] + node.size[1] > y - title,
    );
    if (!over) break;
    y = over.pos[1] + over.size[1] + GAP / 2 + title;
  }
  return [x, y];
}

// One step of undo.
export function change(act) {
  const canvas = app.canvas;
  canvas.emitBeforeChange?.();
  try {
    return act();
  } finally {
    canvas.emitAfterChange?.();
    canvas.setDirty(true, true);
    captureState();
  }
}

export const canMakeParallel = () => kinds().some((kind) => stockOf(kind).length > 0);
export const canTakeOut = () => parallelNodes().some(([, node]) => !isNeeded(node));
export const givesStockModel = (node) => kinds().some((kind) => stockOf(kind).some(([, loader]) => loader === node));

// The nodes whose inside a subgraph is, also those of the subgraphs around them.
export function holdersOf(graph) {
  const holders = graphs().flatMap((one) => one.nodes.filter((node) => node.subgraph === graph));
  return holders.flatMap((node) => [node, ...holdersOf(node.graph)]);
}

const titleOf = ({ graph, title }) => holdersOf(graph)[0]?.title ?? title;

// Returns how many were put in, the titles of the subgraphs in which they are, and whether they are still there.
export function makeParallel() {
  return change(() => {
    const found = kinds().flatMap((kind) => stockOf(kind).map((stock) => [...stock, kind.parallel]));
    const added = [];
    for (const [graph, loader, slot, links, parallel] of found) {
      const node = globalThis.LiteGraph.createNode(parallel);
      const title = globalThis.LiteGraph.NODE_TITLE_HEIGHT;
      graph.add(node);
      node.pos = [-1e6, -1e6]; // not in its own way
      node.pos = freePlace(graph, [loader.pos[0], loader.pos[1] + loader.size[1] + GAP / 2], node.size, title);
      // First what gives it its type: Parallel CLIP takes several.
      loader.connect(slot, node, SLOT);
      for (const link of links) move(graph, link, node, SLOT);
      added.push(node.id);
    }
    const inside = new Set(found.filter(([graph]) => graph !== rootGraph()).map(([graph]) => titleOf({ graph, title: graph.name })));
    const areThere = () => parallelNodes().some(([, node]) => added.includes(node.id));
    return { count: found.length, inside: [...inside], areThere };
  });
}

// Returns how many were taken out, and how many stay since a Parallel Sampler needs them.
export function takeOut() {
  return change(() => {
    const all = parallelNodes();
    const needed = all.filter(([, node]) => isNeeded(node));
    for (const [graph, node] of all) {
      if (isNeeded(node)) continue;
      const incoming = node.inputs[SLOT].link;
      const link = incoming == null ? null : (graph.links.get?.(incoming) ?? graph.links[incoming]);
      const origin = link && graph.getNodeById(link.origin_id);
      if (origin) for (const own of linksOf(graph, node, SLOT)) move(graph, own, origin, link.origin_slot);
      graph.remove(node);
    }
    return { out: all.length - needed.length, stay: needed.length };
  });
}
