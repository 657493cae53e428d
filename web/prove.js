// In the menu of a sampler whose model the devices compute: "Prove it", and for stock ones the report of the latest run;
// report_panel.js has the button, and the report, of ours.
import { app } from "../../scripts/app.js";
import { loaderOf } from "./lib/graph.js";
import { STOCK, watchOutputs } from "./lib/outputs.js";
import { prove } from "./lib/prove.js";
import { openReport } from "./lib/report.js";
import { say } from "./lib/words.js";

const SAMPLER = "ParallelSampler";
const COMPARE = "CompareWithOneDevice";
const runs = new WeakMap(); // stock sampler -> what its latest run told

const samples = (node) =>
  node.inputs?.some(({ type }) => type === "MODEL" || type === "GUIDER") && node.outputs?.some(({ type }) => type === "LATENT");

// Behind a node that makes a model parallel, or known to have run on the devices.
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
