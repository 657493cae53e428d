// Passes the output of a node's run to the files that draw it: after the run, when a workflow is shown again, and from
// ComfyUI's history after a reload of the page. Outputs of stock samplers come from the pack's server part.
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

// Calls `show(node, output)` for each output of a node of the class, perhaps more than once for the same output. Calls
// `mark(node, state, words)` for nodes without an output (yet). `state`: running, failed, cancelled, or done if the earlier
// output still holds. `words`: what went wrong.
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

// Removes the progress text that ComfyUI leaves under the node, three lines high. ComfyUI adds it again for the next run.
export function forgetPhase(node) {
  const text = node?.widgets?.find((widget) => widget.name === PHASE);
  if (!text) return;
  text.onRemove?.();
  node.widgets.splice(node.widgets.indexOf(text), 1);
}

// Marks a run's nodes as running if their graph is shown; they then wait for their outputs.
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

// Returns what went wrong from ComfyUI's message about a failure, without the exception's class.
const wordsOf = ({ exception_message: message } = {}) => message?.trim() ?? "";

// Marks the nodes that ComfyUI names when it refuses to queue a prompt, with its words.
function refuse(nodeErrors) {
  for (const [id, { errors }] of Object.entries(nodeErrors ?? {})) {
    const words = errors.map(({ message, details }) => [message, details].filter(Boolean).join(": "));
    mark([id], "failed", `ComfyUI refused this workflow: ${words.join(" ")}`);
  }
}

// Passes an output to its node's watchers; returns true if there are any. ProveSampler may have run for a stock sampler.
function tell(id, output) {
  const node = output && nodeOf(id);
  const own = watchersOf(node).filter(([kind]) => kind !== STOCK);
  for (const [, show] of own) show(node, output);
  if (node && !own.length && output.parallel_badge) tellStock(id, output);
  return own.length > 0 || Boolean(node && output.parallel_badge);
}

// Passes the output of a stock sampler to its watchers. Without an output, marks it as running.
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

// Updates the phases in the outputs of a prompt: one of its nodes has used the devices since, for instance to decode.
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

// Returns the execution ids of a prompt's watched nodes that are in the graph: those of a measurement are not.
function watchedIn(prompt) {
  const isOurs = (id) => watchers.some(([kind]) => kind !== STOCK && kind === prompt[id].class_type);
  return Object.keys(prompt ?? {}).filter((id) => nodeOf(id) && (isOurs(id) || stock.has(nodeOf(id))));
}

// Shows the newest run of this workflow that had a watched node, however it ended.
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

// Marks the nodes of this workflow's prompt that is running when the page loads; returns true if there is one.
async function recallRunning(graph) {
  const { queue_running: running } = await (await api.fetchApi("/queue")).json();
  const own = running.find(([, , , extra]) => extra?.extra_pnginfo?.workflow?.id === graph.id);
  if (!own || graph !== rootGraph()) return false;
  const [, id, prompt] = own;
  if (!runs.has(id)) runs.set(id, { graph: graph.id, ids: watchedIn(prompt) });
  begin({ prompt_id: id });
  return true;
}

// Returns the outputs of the latest runs of stock samplers, by prompt id and then by execution id.
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
  // ComfyUI calls this after undo as well: all nodes are new then, but their outputs still hold.
  afterConfigureGraph() {
    const again = [...(told.get(rootGraph()?.id) ?? [])];
    for (const [id, output] of again) tellStock(id, output);
    if (tellAll(app.nodeOutputs) || again.length) return;
    recall().catch((error) => console.warn("parallel sampling: the history does not answer", error));
  },
  onNodeOutputsUpdated: tellAll,
});
