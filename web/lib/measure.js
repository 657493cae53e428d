// Measures strategies for the job of one sampler: runs a few steps under each, one prompt after the other. The graph, its
// nodes and their outputs do not change.
import { api } from "../../../scripts/api.js";
import { branchOf, compares, isOurs, jobOf, run, vaeOf } from "./branch.js";
import { nodeOf } from "./graph.js";
import { watchQueue } from "./queue.js";

const STEPS = 4; // one that warms up and three that count; times of a step do not depend on how many there are
const MEASURED = "measured"; // the sampler in the prompt, which stands for no node of the graph
const OUTPUTS = { latent: 0, report: 1, compared: 2 };
const SHOWN = "shown";

let queued = 0; // prompts of this page that measure nothing
let measuring = null; // the id of the one that measures

watchQueue((prompt, { prompt_id: id }) => {
  if (!id) return;
  if (MEASURED in prompt) {
    measuring = id;
    return;
  }
  queued += 1;
  if (measuring) api.deleteItem("queue", measuring); // if it has not begun
});

// Returns the prompt that measures a row, or null if it lacks the selector. With a VAE, one device (`alone`) is measured by
// comparing it with the current strategy: it then runs on a rank of the warm group. As a strategy it would end this group.
function promptOf(job, selector, { inputs, alone }) {
  const vae = alone ? vaeOf(job) : null;
  const nodes = structuredClone(branchOf(job.prompt, [job.id, ...(vae ? [vae[0]] : [])]));
  const sampler = nodes[job.id];
  delete nodes[job.id];
  const { steps, start_at_step: part } = sampler.inputs;
  if (typeof steps === "number" && part === undefined) sampler.inputs.steps = Math.min(steps, STEPS);
  const chooser = Object.keys(nodes).find((key) => nodeOf(key) === selector);
  if (!chooser) return null;
  if (!vae) Object.assign(nodes[chooser].inputs, inputs);
  const shown = vae ? OUTPUTS.compared : isOurs(sampler) ? OUTPUTS.report : OUTPUTS.latent;
  nodes[MEASURED] = vae ? compares(sampler, vae) : sampler;
  nodes[SHOWN] = { class_type: "PreviewAny", inputs: { source: [MEASURED, shown] } };
  return nodes;
}

// Measures each row and then calls `told(row, result, at)`. `result`: the row that the run returned, or null if it failed.
// Stops if a run is cancelled or taken out of the queue, and when the person queues a prompt, which then comes next.
export async function measureRows(sampler, selector, missing, told) {
  const before = queued;
  const job = await jobOf(sampler);
  if (!job) return;
  for (const [at, row] of missing.entries()) {
    const prompt = queued === before && promptOf(job, selector, row);
    if (!prompt) return;
    const { end, outputs } = await run(prompt, job.workflow);
    measuring = null;
    if (!end || end === "execution_interrupted") return;
    const rows = outputs[MEASURED]?.parallel_candidates ?? [];
    told(row, rows.find(({ strategy }) => strategy === row.strategy) ?? null, at);
  }
}
