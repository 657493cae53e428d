// What a node showed after a run, told to those who draw it: when it runs, when a workflow is shown again, and after the
// page was loaded anew, from ComfyUI's history.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { nodeOf, nodesOf, rootGraph } from "./graph.js";
import { watchQueue } from "./queue.js";

const LOOK_BACK = 16; // prompts of the history
const PHASE = "$$node-text-preview"; // ComfyUI's widget
const ENDS = { execution_error: "failed", execution_interrupted: "cancelled", execution_success: "done" };
const watchers = []; // [class, show, mark]
const runs = new Map(); // prompt id -> the graph that it came from, and the execution ids of its nodes
const early = new Map(); // of runs that began before ComfyUI's answer told whose they are: prompt id -> how they ended, if so

// `show(node, output)` for each node of the class that has an output; it may be called again with the same.
// `mark(node, state)` for those of a run that has none (yet): running, failed, cancelled, or done, where what was shown
// before holds.
export function watchOutputs(comfyClass, show, mark = () => {}) {
  watchers.push([comfyClass, show, mark]);
}

function mark(ids, state) {
  for (const node of ids.map(nodeOf)) {
    if (state === "failed" || state === "cancelled") forgetPhase(node);
    for (const [comfyClass, , marked] of watchers) if (node?.comfyClass === comfyClass) marked(node, state);
  }
}

// What a run was doing, which ComfyUI leaves under the node when it ends in the middle of that.
function forgetPhase(node) {
  const text = node?.widgets?.find((widget) => widget.name === PHASE);
  if (text) text.value = "";
}

// A run of the graph that is shown: its nodes wait for their outputs.
function begin({ prompt_id: id }) {
  const run = runs.get(id);
  if (!run) early.set(id, null);
  if (!run || run.graph !== rootGraph()?.id) return;
  run.waiting = new Set(run.ids);
  mark(run.ids, "running");
}

function end({ prompt_id: id }, state) {
  const run = runs.get(id);
  runs.delete(id);
  if (!run && early.has(id)) early.set(id, state);
  if (run?.waiting && run.graph === rootGraph()?.id) mark([...run.waiting], state);
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

// Execution ids of a prompt's nodes that somebody watches, and that are nodes of the graph: a measurement's are not.
function watchedIn(prompt) {
  const isWatched = (id) => watchers.some(([name]) => name === prompt[id].class_type);
  return Object.keys(prompt ?? {}).filter((id) => isWatched(id) && nodeOf(id));
}

// The newest run of this very workflow that had a watched node, whatever became of it.
async function recall() {
  const graph = rootGraph();
  if (!watchers.some(([comfyClass]) => nodesOf(comfyClass).length)) return;
  const before = told;
  const history = await (await api.fetchApi(`/history?max_items=${LOOK_BACK}`)).json();
  for (const run of Object.values(history).sort((a, b) => b.prompt[0] - a.prompt[0])) {
    if (graph !== rootGraph() || before !== told) return;
    if (run.prompt[3]?.extra_pnginfo?.workflow?.id !== graph.id) continue;
    const ids = watchedIn(run.prompt[2]);
    if (!ids.length) continue;
    const last = run.status?.messages?.map(([kind]) => ENDS[kind]).findLast(Boolean) ?? "done";
    tellAll(run.outputs);
    mark(ids.filter((id) => !run.outputs[id]), last);
    return;
  }
}

app.registerExtension({
  name: "parallel_sampling.outputs",
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      if (!detail) return;
      const id = detail.display_node ?? detail.node;
      runs.get(detail.prompt_id)?.waiting?.delete(String(id));
      tellAll({ [id]: detail.output });
    });
    watchQueue((prompt, { prompt_id: id }) => {
      if (!id) return;
      runs.set(id, { graph: rootGraph()?.id, ids: watchedIn(prompt) });
      const [isEarly, ended] = [early.has(id), early.get(id)];
      early.delete(id);
      if (isEarly) begin({ prompt_id: id });
      if (ended) end({ prompt_id: id }, ended);
    });
    api.addEventListener("execution_start", ({ detail }) => begin(detail));
    for (const [event, state] of Object.entries(ENDS)) api.addEventListener(event, ({ detail }) => end(detail, state));
  },
  // Also after undo, which makes all nodes anew and keeps what they showed.
  afterConfigureGraph() {
    if (tellAll(app.nodeOutputs)) return;
    recall().catch((error) => console.warn("parallel sampling: the history does not answer", error));
  },
  onNodeOutputsUpdated: tellAll,
});
