// What a node showed after a run, told to those who draw it: when it runs, when a workflow is shown again, and after the
// page was loaded anew, from ComfyUI's history. What a stock sampler did on the devices the pack's own server part tells.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { nodeOf, nodesOf, rootGraph } from "./graph.js";
import { watchQueue } from "./queue.js";

const LOOK_BACK = 16; // prompts of the history
const PHASE = "$$node-text-preview"; // ComfyUI's widget
const ENDS = { execution_error: "failed", execution_interrupted: "cancelled", execution_success: "done" };
const RUN = "parallel_sampling.run";
const PHASES = "parallel_sampling.phases";
export const STOCK = null; // in the place of a class: any sampler that is not the pack's and ran on the devices
const watchers = []; // [class, show, mark]
const stock = new WeakSet(); // nodes of that kind
const told = new Map(); // graph -> what those showed, by execution id; ComfyUI keeps only what nodes say themselves
const runs = new Map(); // prompt id -> the graph that it came from, and the execution ids of its nodes
const early = new Map(); // of runs that began before ComfyUI's answer told whose they are: prompt id -> how they ended, if so

// `show(node, output)` for each node of the class that has an output; it may be called again with the same.
// `mark(node, state, words)` for those of a run that has none (yet): running, failed, cancelled, or done, where what was shown
// before holds; `words`: what went wrong.
export function watchOutputs(comfyClass, show, mark = () => {}) {
  watchers.push([comfyClass, show, mark]);
}

const watchersOf = (node) =>
  node ? watchers.filter(([kind]) => (kind === STOCK ? stock.has(node) : kind === node.comfyClass)) : [];

function mark(ids, state, words = "") {
  const lost = state === "failed" || state === "cancelled";
  for (const id of ids) {
    const node = nodeOf(id);
    if (lost) forgetPhase(node);
    if (lost) told.get(rootGraph()?.id)?.delete(id);
    for (const [, , marked] of watchersOf(node)) marked(node, state, words);
  }
}

// What a run was doing, which ComfyUI leaves under the node, as high as three lines; it adds it again for the next run.
export function forgetPhase(node) {
  const text = node?.widgets?.find((widget) => widget.name === PHASE);
  if (!text) return;
  text.onRemove?.();
  node.widgets.splice(node.widgets.indexOf(text), 1);
}

// A run of the graph that is shown: its nodes wait for their outputs.
function begin({ prompt_id: id }) {
  const run = runs.get(id);
  if (!run) early.set(id, null);
  if (!run || run.graph !== rootGraph()?.id) return;
  run.waiting = new Set(run.ids);
  mark(run.ids, "running");
}

function end(detail, state) {
  const { prompt_id: id } = detail;
  const run = runs.get(id);
  runs.delete(id);
  if (!run && early.has(id)) early.set(id, [detail, state]);
  if (run?.waiting && run.graph === rootGraph()?.id) mark([...run.waiting], state, wordsOf(detail));
}

// Of ComfyUI's message about a failure: what went wrong, without its class.
const wordsOf = ({ exception_message: message } = {}) => message?.trim() ?? "";

// What ComfyUI says when it refuses to queue a prompt, on each node that it names.
function refuse(nodeErrors) {
  for (const [id, { errors }] of Object.entries(nodeErrors ?? {})) {
    const words = errors.map(({ message, details }) => [message, details].filter(Boolean).join(": "));
    mark([id], "failed", `ComfyUI refused this workflow: ${words.join(" ")}`);
  }
}

// Whether somebody watches that node. In a stock sampler's place the node that proves its job may have run.
function tell(id, output) {
  const node = output && nodeOf(id);
  const own = watchersOf(node).filter(([kind]) => kind !== STOCK);
  for (const [, show] of own) show(node, output);
  if (node && !own.length && output.parallel_badge) tellStock(id, output);
  return own.length > 0 || Boolean(node && output.parallel_badge);
}

// Of a stock sampler of the graph that is shown; without an output its run begins.
function tellStock(id, output) {
  const node = nodeOf(id);
  if (!node) return;
  stock.add(node);
  if (!output) return mark([id], "running");
  const graph = rootGraph().id;
  told.set(graph, (told.get(graph) ?? new Map()).set(id, output));
  times += 1;
  for (const [kind, show] of watchers) if (kind === STOCK) show(node, output);
}

function hear({ prompt_id: prompt, node: id, output }) {
  const run = runs.get(prompt);
  if (run && run.graph !== rootGraph()?.id) return; // recalled when that graph is shown again
  if (output) run?.waiting?.delete(id);
  else run?.waiting?.add(id);
  tellStock(id, output);
}

// What a prompt had the devices for after its sampler: a picture was decoded.
function takePhases(phases) {
  const outputs = [...Object.entries(app.nodeOutputs ?? {}), ...(told.get(rootGraph()?.id) ?? [])];
  for (const [id, output] of outputs) {
    if (output?.parallel_phases?.[0].prompt !== phases.prompt) continue;
    output.parallel_phases = [phases];
    tell(id, output);
  }
}

let times = 0; // times that anybody was told something, so that an older answer does not follow a newer one

function tellAll(outputs) {
  const found = Object.entries(outputs ?? {}).filter(([id, output]) => tell(id, output)).length;
  times += found;
  return found > 0;
}

// Execution ids of a prompt's nodes that somebody watches, and that are nodes of the graph: a measurement's are not.
function watchedIn(prompt) {
  const isOurs = (id) => watchers.some(([kind]) => kind !== STOCK && kind === prompt[id].class_type);
  return Object.keys(prompt ?? {}).filter((id) => nodeOf(id) && (isOurs(id) || stock.has(nodeOf(id))));
}

// The newest run of this very workflow that had a watched node, whatever became of it.
async function recall() {
  const graph = rootGraph();
  const before = times;
  const kept = await keptRuns();
  if (!Object.keys(kept).length && !watchers.some(([kind]) => kind !== STOCK && nodesOf(kind).length)) return;
  if (await recallRunning(graph)) return;
  const history = await (await api.fetchApi(`/history?max_items=${LOOK_BACK}`)).json();
  for (const [prompt, run] of Object.entries(history).sort(([, a], [, b]) => b.prompt[0] - a.prompt[0])) {
    if (graph !== rootGraph() || before !== times) return;
    if (run.prompt[3]?.extra_pnginfo?.workflow?.id !== graph.id) continue;
    const own = Object.entries(kept[prompt] ?? {}).filter(([id]) => nodeOf(id));
    const ids = watchedIn(run.prompt[2]);
    if (!ids.length && !own.length) continue;
    const [kind, detail] = run.status?.messages?.findLast(([one]) => ENDS[one]) ?? ["execution_success"];
    const last = ENDS[kind];
    tellAll(run.outputs);
    if (last === "done") for (const [id, output] of own) tellStock(id, output);
    mark(ids.filter((id) => !run.outputs[id] && !kept[prompt]?.[id]), last, wordsOf(detail));
    return;
  }
}

// A prompt of this very workflow that runs while the page is loaded anew; whether there is one.
async function recallRunning(graph) {
  const { queue_running: running } = await (await api.fetchApi("/queue")).json();
  const own = running.find(([, , , extra]) => extra?.extra_pnginfo?.workflow?.id === graph.id);
  if (!own || graph !== rootGraph()) return false;
  const [, id, prompt] = own;
  if (!runs.has(id)) runs.set(id, { graph: graph.id, ids: watchedIn(prompt) });
  begin({ prompt_id: id });
  return true;
}

// By prompt and execution id what stock samplers told of their latest runs.
export async function keptRuns() {
  const answer = await api.fetchApi("/parallel_sampling/runs");
  return answer.ok ? answer.json() : {};
}

app.registerExtension({
  name: "parallel_sampling.outputs",
  setup() {
    api.addEventListener(RUN, ({ detail }) => hear(detail));
    api.addEventListener(PHASES, ({ detail }) => takePhases(detail));
    api.addEventListener("executed", ({ detail }) => {
      if (!detail) return;
      const id = detail.display_node ?? detail.node;
      runs.get(detail.prompt_id)?.waiting?.delete(String(id));
      tellAll({ [id]: detail.output });
    });
    watchQueue((prompt, { prompt_id: id, node_errors: nodeErrors }) => {
      refuse(nodeErrors);
      if (!id) return;
      runs.set(id, { graph: rootGraph()?.id, ids: watchedIn(prompt) });
      const [isEarly, ended] = [early.has(id), early.get(id)];
      early.delete(id);
      if (isEarly) begin({ prompt_id: id });
      if (ended) end(...ended);
    });
    api.addEventListener("execution_start", ({ detail }) => begin(detail));
    for (const [event, state] of Object.entries(ENDS)) api.addEventListener(event, ({ detail }) => end(detail, state));
  },
  // Also after undo, which makes all nodes anew and keeps what they showed.
  afterConfigureGraph() {
    const again = [...(told.get(rootGraph()?.id) ?? [])];
    for (const [id, output] of again) tellStock(id, output);
    if (tellAll(app.nodeOutputs) || again.length) return;
    recall().catch((error) => console.warn("parallel sampling: the history does not answer", error));
  },
  onNodeOutputsUpdated: tellAll,
});
