// Adds "Prove it" to the menu of samplers whose model the devices compute, and the report of the latest run to that of
// stock samplers. report_panel.js shows the report of the pack's own samplers, and a button on Parallel Sampler.
import { app } from "../../scripts/app.js";
import { COMPARE, loaderOf, SAMPLER } from "./lib/graph.js";
import { STOCK, watchOutputs } from "./lib/outputs.js";
import { prove } from "./lib/prove.js";
import { openReport } from "./lib/report.js";
import { say } from "./lib/words.js";

const runs = new WeakMap(); // stock sampler -> what its latest run told

const samples = (node) =>
  node.inputs?.some(({ type }) => type === "MODEL" || type === "GUIDER") && node.outputs?.some(({ type }) => type === "LATENT");

// True if a stock sampler gets its model from a node that makes it parallel, or if it has run on the devices.
const isStock = (node) => ![SAMPLER, COMPARE].includes(node.comfyClass) && samples(node) && (runs.has(node) || loaderOf(node));

app.registerExtension({
  name: "parallel_sampling.prove",

  setup() {
    const mark = (node, state) => (state === "failed" || state === "cancelled") && runs.delete(node);
    watchOutputs(STOCK, (node, output) => runs.set(node, output), mark);
  },

  getNodeMenuItems(node) {
    if (node.comfyClass !== SAMPLER && !isStock(node)) return [];
    const output = runs.get(node);
    return [
      { content: say("prove"), callback: () => prove(node) },
      ...(output ? [{ content: say("open_report"), callback: () => openReport(node, output) }] : []),
    ];
  },
});
