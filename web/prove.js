// "Prove it" in the menu of a Parallel Sampler; report_panel.js has the button.
import { app } from "../../scripts/app.js";
import { prove } from "./lib/prove.js";
import { say } from "./lib/words.js";

const SAMPLER = "ParallelSampler";

app.registerExtension({
  name: "parallel_sampling.prove",

  getNodeMenuItems(node) {
    return node.comfyClass === SAMPLER ? [{ content: say("prove"), callback: () => prove(node) }] : [];
  },
});
