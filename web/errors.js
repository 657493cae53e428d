// Marks the inputs of Strategy Selector that are wrong, and no others, when ComfyUI refuses to queue a prompt: its
// validation marks each input that a node checks, whichever it is. What the node says has a line for each problem,
// "inputs: words".
import { app } from "../../scripts/app.js";
import { watchQueue } from "./lib/queue.js";

const SELECTOR = "StrategySelector";
const KIND = "custom_validation_failed";

// The lines of the error that concern its own input.
function linesOf({ details, extra_info: { input_name: input } }) {
  const words = details.slice(details.indexOf(" - ") + 3);
  return words.split("\n").filter((line) => line.split(": ", 1)[0].split(", ").includes(input));
}

function sift(nodeErrors) {
  for (const node of Object.values(nodeErrors ?? {})) {
    if (node.class_type !== SELECTOR) continue;
    node.refused = true; // until the settings can run: web/strategy_panel.js
    node.errors = node.errors.flatMap((error) => {
      if (error.type !== KIND) return [error];
      const lines = linesOf(error).map((line) => line.slice(line.indexOf(": ") + 2));
      return lines.length ? [{ ...error, message: lines.join(" "), details: error.extra_info.input_name }] : [];
    });
  }
}

app.registerExtension({
  name: "parallel_sampling.errors",
  setup() {
    watchQueue((prompt, answer) => sift(answer.node_errors));
  },
});
