// Adds "Preload" to the menu of loaders: the devices load the model now, before its first prompt.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { LOADERS, nodeOf } from "./lib/graph.js";
import { translate } from "./lib/said.js";
import { tell } from "./lib/tell.js";
import { say } from "./lib/words.js";

const told = (severity, words) => tell(severity, words, { summary: say("preload"), life: 8000 });

async function preload(node) {
  try {
    const { output: prompt } = await app.graphToPrompt();
    const id = Object.keys(prompt).find((key) => nodeOf(key) === node);
    if (!id) return told("warn", say("preload_off"));
    const body = JSON.stringify({ prompt, node: id });
    const answer = await api.fetchApi("/parallel_sampling/preload", { method: "POST", body });
    const { error, model, devices, was_there: wasThere } = await answer.json();
    if (error) return told("warn", translate(error));
    told("success", say(wasThere ? "preload_held" : "preloaded", { model, devices: devices.join(", ") }));
  } catch (error) {
    told("error", translate(`ComfyUI did not answer: ${error.message}`));
  }
}

app.registerExtension({
  name: "parallel_sampling.preload",

  getNodeMenuItems(node) {
    return LOADERS.includes(node.comfyClass) ? [{ content: say("preload"), callback: () => preload(node) }] : [];
  },
});
