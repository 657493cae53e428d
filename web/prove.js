// "Prove it" in the menu of a Parallel Sampler; report_panel.js has the button.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { forgetProof, prove, showProof } from "./lib/prove.js";
import { say } from "./lib/words.js";

const SAMPLER = "ParallelSampler";

app.registerExtension({
  name: "parallel_sampling.prove",

  setup() {
    api.addEventListener("executed", ({ detail }) => detail && showProof(detail));
    for (const event of ["execution_error", "execution_interrupted"]) {
      api.addEventListener(event, ({ detail }) => detail && forgetProof(detail));
    }
  },

  getNodeMenuItems(node) {
    return node.comfyClass === SAMPLER ? [{ content: say("prove"), callback: () => prove(node) }] : [];
  },
});
