// Runs the same job, with the same seed, on one device and on all of them, and shows both pictures under a slider.
import { branchOf, compares, jobOf, run, vaeOf } from "./branch.js";
import { drawComparison } from "./comparison.js";
import { openDialog } from "./dialog.js";
import { addStyle, element } from "./dom.js";
import { tell } from "./tell.js";
import { say } from "./words.js";
import { translate } from "./said.js";

addStyle(`
.parallel-proof .parallel-comparison { flex: 0 1 auto; }
.parallel-proof .pictures { flex: 0 1 auto; height: 45vh; max-width: 100%; align-self: center; }
.parallel-proof details { min-height: 0; overflow: auto; flex: 0 1 auto; }
`);

function complain(words) {
  tell("warn", words, { summary: say("prove"), life: 10_000 });
}

// Runs the comparison. The node that compares takes the sampler's place in the prompt, so that bars, progress and report
// appear at the sampler as in any run.
export async function prove(node) {
  try {
    const job = await jobOf(node);
    const vae = job && vaeOf(job);
    if (!vae) return complain(say(job ? "prove_no_vae" : "prove_off"));
    const nodes = branchOf(job.prompt, [job.id, vae[0]]);
    nodes[job.id] = compares(nodes[job.id], vae);
    const { end, outputs } = await run(nodes, job.workflow);
    if (end === "execution_success") show(outputs[job.id]); // else ComfyUI says why
  } catch (error) {
    complain(error.message);
  }
}

// Shows the result, with the report folded below it so that the result fits on a laptop's screen.
function show({ parallel_comparison: [told], text: [report] }) {
  const { dialog, text } = openDialog(say("proof", { count: told.devices }), translate(report));
  dialog.classList.add("parallel-proof");
  const folded = element("details", "", element("summary", "", say("whole_report")));
  text.before(drawComparison(told), folded);
  folded.append(text);
}
