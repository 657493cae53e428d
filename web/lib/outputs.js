// What a node showed after a run, told to those who draw it: when it runs, when a workflow is shown again, and after the
// page was loaded anew, from ComfyUI's history.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { nodeOf, nodesOf, rootGraph } from "./graph.js";

const LOOK_BACK = 16; // prompts of the history
const watchers = []; // [class, show]

// `show(node, output)` for each node of the class that has an output; it may be called again with the same.
export function watchOutputs(comfyClass, show) {
  watchers.push([comfyClass, show]);
}

// Whether somebody watches that node.
function tell(id, output) {
  const node = output && nodeOf(id);
  const own = watchers.filter(([comfyClass]) => comfyClass === node?.comfyClass);
  for (const [, show] of own) show(node, output);
  return own.length > 0;
}

let told = 0; // times that anybody was told something, so that an older answer does not follow a newer one

function tellAll(outputs) {
  const found = Object.entries(outputs ?? {}).filter(([id, output]) => tell(id, output)).length;
  told += found;
  return found > 0;
}

// The newest run of this very workflow that has an output of a watched node.
async function recall() {
  const graph = rootGraph();
  if (!watchers.some(([comfyClass]) => nodesOf(comfyClass).length)) return;
  const before = told;
  const history = await (await api.fetchApi(`/history?max_items=${LOOK_BACK}`)).json();
  for (const run of Object.values(history).sort((a, b) => b.prompt[0] - a.prompt[0])) {
    if (graph !== rootGraph() || before !== told) return;
    if (run.prompt[3]?.extra_pnginfo?.workflow?.id === graph.id && tellAll(run.outputs)) return;
  }
}

app.registerExtension({
  name: "parallel_sampling.outputs",
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      if (detail) tellAll({ [detail.display_node ?? detail.node]: detail.output });
    });
  },
  // Also after undo, which makes all nodes anew and keeps what they showed.
  afterConfigureGraph() {
    if (tellAll(app.nodeOutputs)) return;
    recall().catch((error) => console.warn("parallel sampling: the history does not answer", error));
  },
  onNodeOutputsUpdated: tellAll,
});
