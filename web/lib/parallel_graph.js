// Puts Parallel Model behind every loader of the graph that has none, and takes it out again; links and values are kept.
// Loaders of GGUF files are exchanged. If the settings say so, it also puts in Parallel CLIP, and exchanges ComfyUI's VAE
// nodes for the pack's.
import { app } from "../../../scripts/app.js";
import { exchangeBack, exchangedLoaders, exchangeLoader, isGgufLoader } from "./gguf_loaders.js";
import { nodesOf, rootGraph } from "./graph.js";
import { ACTIVE, activeOf, change, exchange, GAP, graphs, linkOf, linksOf, move, OUTSIDE, place } from "./graph_changes.js";

const MODELS = { parallel: "ParallelModel", type: "MODEL" };
const ENCODERS = { parallel: "ParallelCLIP", type: "CLIP" };
const VAES = { VAEDecode: ["ParallelVAEDecode", "IMAGE"], VAEEncode: ["ParallelVAEEncode", "LATENT"] }; // what each gives
export const ENCODERS_TOO = "parallel_sampling.make_encoders_parallel";
export const STOCK_VAES = Object.keys(VAES);
const SLOT = 0; // of what both take and give
const FOR_SAMPLERS = 1; // of Parallel Model's other output
const REPORT = 1; // of a VAE's
const isOurs = (node) => node.constructor.nodeData?.python_module === parallelModule();
const parallelModule = () => globalThis.LiteGraph.registered_node_types[MODELS.parallel]?.nodeData?.python_module;
const withEncoders = () => Boolean(app.extensionManager.setting.get(ENCODERS_TOO));
const kinds = () => (withEncoders() ? [MODELS, ENCODERS] : [MODELS]);
// Return [graph, node, class to replace it with, type of its output] for each VAE node to exchange.
const stockVaes = () =>
  Object.entries(withEncoders() ? VAES : {}).flatMap(([stock, [parallel, type]]) =>
    graphs().flatMap((graph) => activeOf(graph, stock).map((node) => [graph, node, parallel, type])),
  );
const parallelVaes = () =>
  Object.entries(withEncoders() ? VAES : {}).flatMap(([stock, [parallel, type]]) =>
    graphs().flatMap((graph) =>
      activeOf(graph, parallel)
        .filter((node) => !linksOf(graph, node, REPORT).length)
        .map((node) => [graph, node, stock, type]),
    ),
  );

const slotsOf = (node, { type }) => node.outputs.flatMap((output, slot) => (output.type === type ? [slot] : []));

// Returns true if the link leads to the parallel node of its kind, directly or through nodes that change what it carries.
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

// Returns [graph, loader, slot, links that lead to no parallel node] for each loader: a node that gives `kind` but takes none.
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

export const canMakeParallel = () => kinds().some((kind) => stockOf(kind).length > 0) || stockVaes().length > 0;
export const hasStockEncoders = () =>
  stockOf(ENCODERS).length > 0 || graphs().some((graph) => STOCK_VAES.some((kind) => activeOf(graph, kind).length > 0));
export const canTakeOut = () =>
  parallelNodes().some(([, node]) => !isNeeded(node)) || exchangedLoaders().length > 0 || parallelVaes().length > 0;
export const givesStockModel = (node) => kinds().some((kind) => stockOf(kind).some(([, loader]) => loader === node));

// Returns the nodes that contain this subgraph, directly or through the subgraphs around them.
export function holdersOf(graph) {
  const holders = graphs().flatMap((one) => one.nodes.filter((node) => node.subgraph === graph));
  return holders.flatMap((node) => [node, ...holdersOf(node.graph)]);
}

const titleOf = ({ graph, title }) => holdersOf(graph)[0]?.title ?? title;

// Puts the nodes in. Returns their count, the titles of the subgraphs with some, and a function: true if any is still there.
export function makeParallel() {
  return change(() => {
    const found = kinds().flatMap((kind) => stockOf(kind).map((stock) => [...stock, kind.parallel]));
    const added = [];
    for (const [graph, loader, slot, links, parallel] of found) {
      if (isGgufLoader(loader) && links.length === linksOf(graph, loader, slot).length) {
        added.push(exchangeLoader(graph, loader).id);
        continue;
      }
      const node = globalThis.LiteGraph.createNode(parallel);
      graph.add(node);
      place(graph, node, [loader.pos[0], loader.pos[1] + loader.size[1] + GAP / 2]);
      // The loader is connected first: it sets the type of Parallel CLIP, which takes several.
      loader.connect(slot, node, SLOT);
      for (const link of links) move(graph, link, node, SLOT);
      added.push(node.id);
    }
    const vaes = stockVaes();
    for (const [graph, node, parallel, type] of vaes) added.push(exchange(graph, node, parallel, {}, [type]).id);
    const every = [...found, ...vaes];
    const inside = new Set(every.filter(([graph]) => graph !== rootGraph()).map(([graph]) => titleOf({ graph, title: graph.name })));
    const areThere = () => [...parallelNodes(), ...exchangedLoaders(), ...parallelVaes()].some(([, node]) => added.includes(node.id));
    return { count: every.length, inside: [...inside], areThere };
  });
}

// Takes the nodes out. Returns how many, and how many stay because a node such as Parallel Sampler needs them.
export function takeOut() {
  return change(() => {
    const all = parallelNodes();
    const needed = all.filter(([, node]) => isNeeded(node));
    for (const [graph, node] of all) {
      if (isNeeded(node)) continue;
      const incoming = node.inputs[SLOT].link;
      const link = linkOf(graph, incoming);
      const origin = link && graph.getNodeById(link.origin_id);
      if (origin) for (const own of linksOf(graph, node, SLOT)) move(graph, own, origin, link.origin_slot);
      graph.remove(node);
    }
    const loaders = exchangedLoaders();
    for (const [graph, node] of loaders) exchangeBack(graph, node);
    const vaes = parallelVaes();
    for (const [graph, node, stock, type] of vaes) exchange(graph, node, stock, {}, [type]);
    return { out: all.length - needed.length + loaders.length + vaes.length, stay: needed.length };
  });
}
