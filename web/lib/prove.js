// The same job, seed and all, on one device and on all of them, shown under a slider.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { branchOf, isLink, jobOf, queue } from "./branch.js";
import { drawComparison } from "./comparison.js";
import { openDialog } from "./dialog.js";
import { say } from "./words.js";

const COMPARE = "CompareWithOneDevice";
const LATENT = 0; // the sampler's output
const proofs = new Set(); // ids of prompts whose outcome is waited for

// The VAE that decodes this latent, as the nodes that follow have it.
function vaeOf(prompt, id, slot) {
  const seen = new Set();
  const waiting = [[id, slot]];
  while (waiting.length) {
    const [origin, from] = waiting.shift();
    for (const [next, { inputs }] of Object.entries(prompt)) {
      const takes = Object.values(inputs).some((v) => isLink(v) && v[0] === origin && (from === null || v[1] === from));
      if (!takes || seen.has(next)) continue;
      if (isLink(inputs.vae)) return inputs.vae;
      seen.add(next);
      waiting.push([next, null]);
    }
  }
  return null;
}

function complain(words) {
  app.extensionManager.toast.add({ severity: "warn", summary: say("prove"), detail: words, life: 10_000 });
}

// The sampler's place in the prompt is taken by the node that compares, so that bars, progress and report are where they
// are for any run of it.
export async function prove(node) {
  const job = await jobOf(node);
  const vae = job && vaeOf(job.prompt, job.id, LATENT);
  if (!vae) return complain(say(job ? "prove_no_vae" : "prove_off"));
  const nodes = branchOf(job.prompt, [job.id, vae[0]]);
  nodes[job.id] = { ...nodes[job.id], class_type: COMPARE, inputs: { ...nodes[job.id].inputs, vae } };
  try {
    proofs.add(await queue(nodes, job.workflow));
  } catch (error) {
    complain(error.message);
  }
}

export function showProof({ prompt_id: id, output }) {
  const told = proofs.has(id) && output?.parallel_comparison?.[0];
  if (!told) return;
  proofs.delete(id);
  const { text } = openDialog(say("proof"), output.text[0]);
  text.before(drawComparison(told));
  text.style.maxHeight = "15vh";
}

// Whatever else became of it; ComfyUI says why.
export function forgetProof({ prompt_id: id }) {
  proofs.delete(id);
}
