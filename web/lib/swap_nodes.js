// Exchanges Load Diffusion Model and KSampler for Parallel Model Loader and Parallel Sampler, and back; values, links and
// positions are kept. If a node changes the model on its way, or other nodes need the loader's model, the loader stays and
// Parallel Model is put before the sampler. Parallel Model takes no model that is parallel already.
import { followersOf, loaderOf, originOf } from "./graph.js";
import {
  ACTIVE, activeOf, bring, change, exchange, GAP, graphs, linkOf, linksOf, offersFile, OUTSIDE, place, slotOf, slotOfType,
} from "./graph_changes.js";

const STOCK = { loader: "UNETLoader", sampler: "KSampler" };
const OURS = { loader: "ParallelModelLoader", sampler: "ParallelSampler", model: "ParallelModel" };
const MODEL = "MODEL";
const PARALLEL = "PARALLEL_MODEL";
const FILE = { UNETLoader: "unet_name", ParallelModelLoader: "model_name" }; // the input with the file's name

const isUsed = (graph, node, type) => linksOf(graph, node, slotOfType(node, type)).length > 0;

const takesFile = (kind, node) => offersFile(kind, FILE[kind], node, FILE[node.comfyClass]);

// Returns true if the loader's model goes directly to active KSamplers, to no other nodes, and not out of a subgraph.
function servesSamplersAlone(graph, loader) {
  const slot = slotOfType(loader, MODEL);
  const followers = followersOf(loader, loader.outputs[slot].name);
  const stays = linksOf(graph, loader, slot).every((link) => Number(link.target_id) !== OUTSIDE);
  return stays && followers.every(({ comfyClass, mode }) => comfyClass === STOCK.sampler && mode === ACTIVE);
}

// Returns [node, slot] that gives the parallel model; adds it if needed. `made`: added Parallel Model nodes by their source.
function parallelFor(graph, sampler, made) {
  const origin = originOf(sampler, "model");
  const ready = slotOfType(origin, PARALLEL);
  if (ready >= 0) return [origin, ready];
  const isPlain = origin.comfyClass === STOCK.loader && origin.mode === ACTIVE && servesSamplersAlone(graph, origin);
  if (isPlain && takesFile(OURS.loader, origin)) {
    const loader = exchange(graph, origin, OURS.loader, { unet_name: "model_name" }, [MODEL]);
    return [loader, slotOfType(loader, PARALLEL)];
  }
  const link = linkOf(graph, sampler.inputs[slotOf(sampler.inputs, "model")].link);
  const key = `${link.origin_id}:${link.origin_slot}`;
  if (!made.has(key)) {
    const node = globalThis.LiteGraph.createNode(OURS.model);
    graph.add(node);
    place(graph, node, [sampler.pos[0], sampler.pos[1] + sampler.size[1] + GAP / 2]);
    bring(graph, link, node, "model");
    made.set(key, node);
  }
  return [made.get(key), slotOfType(made.get(key), PARALLEL)];
}

// Returns true if the sampler's model is connected, and is not parallel yet when another node changes it.
function canHaveOurs(sampler) {
  const origin = originOf(sampler, "model");
  return origin && (!loaderOf(origin) || slotOfType(origin, PARALLEL) >= 0);
}

const givesModel = (node) => [OURS.loader, OURS.model].includes(originOf(node, "parallel_model")?.comfyClass);
const samplersToSwap = (graph) => activeOf(graph, STOCK.sampler).filter(canHaveOurs);
const samplersToSwapBack = (graph) => activeOf(graph, OURS.sampler).filter(givesModel);

export const canSwapIn = () => graphs().some((graph) => samplersToSwap(graph).length);
export const canSwapOut = () => graphs().some((graph) => samplersToSwapBack(graph).length);

// Exchanges the samplers for parallel ones and returns how many.
export function swapIn() {
  return change(() => {
    let count = 0;
    for (const graph of graphs()) {
      const made = new Map();
      for (const sampler of samplersToSwap(graph)) {
        const [origin, slot] = parallelFor(graph, sampler, made);
        const ours = exchange(graph, sampler, OURS.sampler, {}, ["LATENT"]);
        origin.connect(slot, ours, slotOf(ours.inputs, "parallel_model"));
        count += 1;
      }
    }
    return count;
  });
}

// Exchanges the samplers back and returns how many. The parallel nodes before them go too, unless other nodes need them.
export function swapOut() {
  return change(() => {
    let count = 0;
    for (const graph of graphs()) {
      for (const sampler of samplersToSwapBack(graph)) {
        const origin = originOf(sampler, "parallel_model");
        const stock = exchange(graph, sampler, STOCK.sampler, {}, ["LATENT"]);
        count += 1;
        if (origin.comfyClass === OURS.loader) origin.connect(slotOfType(origin, MODEL), stock, slotOf(stock.inputs, "model"));
        else bring(graph, linkOf(graph, origin.inputs[slotOf(origin.inputs, "model")].link), stock, "model");
        if (isUsed(graph, origin, PARALLEL)) continue;
        if (origin.comfyClass === OURS.model && !isUsed(graph, origin, MODEL)) graph.remove(origin);
        if (origin.comfyClass === OURS.loader && takesFile(STOCK.loader, origin)) {
          exchange(graph, origin, STOCK.loader, { model_name: "unet_name" }, [MODEL]);
        }
      }
    }
    return count;
  });
}
