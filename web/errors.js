// Marks only the wrong inputs of Strategy Selector when ComfyUI refuses to queue a prompt. ComfyUI's validation marks
// every input that the node checks; the node's message has a line `inputs: words` for each problem.
import { app } from "../../scripts/app.js";
import { watchQueue } from "./lib/queue.js";
import { translate } from "./lib/said.js";

const SELECTOR = "StrategySelector";
const KIND = "custom_validation_failed";

// Returns the lines of an error's message that concern the input that the error marks.
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
      const lines = linesOf(error).map((line) => translate(line.slice(line.indexOf(": ") + 2)));
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
