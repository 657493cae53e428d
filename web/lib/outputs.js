// What a node showed after a run, told to those who draw it: when it runs, when a workflow is shown again, and after the
// page was loaded anew, from ComfyUI's history.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { nodeOf, nodesOf } from "./graph.js";

const LOOK_BACK = 16; // prompts of the history
const watchers = []; // [class, show]

// `show(node, output)` for each node of the class that has an output; it may be called again with the same.
export function watchOutputs(comfyClass, show) {
  watchers.push([comfyClass, show]);
}

function tell(id, output) {
  const node = nodeOf(id);
  for (const [comfyClass, show] of watchers) if (output && node?.comfyClass === comfyClass) show(node, output);
}

// The newest run of this very workflow that has an output of a watched node.
async function recall() {
  const graph = app.rootGraph ?? app.graph;
  if (!watchers.some(([comfyClass]) => nodesOf(comfyClass).length)) return;
  const history = await (await api.fetchApi(`/history?max_items=${LOOK_BACK}`)).json();
  if (graph !== (app.rootGraph ?? app.graph)) return;
  for (const run of Object.values(history).sort((a, b) => b.prompt[0] - a.prompt[0])) {
    if (run.prompt[3]?.extra_pnginfo?.workflow?.id !== graph.id) continue;
    const found = Object.entries(run.outputs ?? {}).filter(([id]) =>
      watchers.some(([comfyClass]) => nodeOf(id)?.comfyClass === comfyClass),
    );
    for (const [id, output] of found) tell(id, output);
    if (found.length) return;
  }
}

app.registerExtension({
  name: "parallel_sampling.outputs",
  setup() {
    api.addEventListener("executed", ({ detail }) => tell(detail?.display_node ?? detail?.node, detail?.output));
  },
  afterConfigureGraph() {
    recall().catch((error) => console.warn("parallel sampling: the history does not answer", error));
  },
  onNodeOutputsUpdated(outputs) {
    // Keys are ids; those in subgraphs begin with the subgraph's own, by which nothing is found here: left alone.
    for (const [id, output] of Object.entries(outputs ?? {})) tell(id, output);
  },
});
