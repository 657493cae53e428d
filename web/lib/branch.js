// Extracts the job of one sampler from the graph's prompt, with only the nodes that it needs, and runs such jobs.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { COMPARE, nodeOf, rootGraph, SAMPLER } from "./graph.js";
import { keptRuns } from "./outputs.js";

const LOOK_BACK = 16; // prompts of the history
const SEEDS = ["seed", "noise_seed"];
const OURS = [SAMPLER, COMPARE];

const isLink = (value) => Array.isArray(value) && value.length === 2 && typeof value[1] === "number";

// Returns the nodes `ids` of a prompt and all nodes that they need, by id.
export function branchOf(prompt, ids) {
  const found = {};
  const waiting = [...ids];
  while (waiting.length) {
    const id = waiting.pop();
    if (id in found || !prompt[id]) continue;
    found[id] = prompt[id];
    waiting.push(...Object.values(prompt[id].inputs).filter(isLink).map(([origin]) => origin));
  }
  return found;
}

// Returns the nodes as text to compare, without the values of seeds; a linked seed stays.
function besideSeeds(branch) {
  return JSON.stringify(
    Object.entries(branch)
      .map(([id, { class_type: kind, inputs }]) => [
        id,
        kind,
        Object.entries(inputs).filter(([name, value]) => !SEEDS.includes(name) || isLink(value)).sort(),
      ])
      .sort(),
  );
}

// Execution id of a node -> the prompt of its latest output. ComfyUI's history lists a prompt only after its end.
const shownBy = new Map();
for (const event of ["executed", "parallel_sampling.run"])
  api.addEventListener(event, ({ detail }) => detail?.output && shownBy.set(detail.node, detail.prompt_id));

// Returns the latest prompt of this workflow with an output of this node as class `kind`; other nodes may still be running.
async function latest(id, kind) {
  const isThis = ([, , nodes, extra]) =>
    extra?.extra_pnginfo?.workflow?.id === rootGraph().id && nodes[id]?.class_type === kind;
  const { queue_running: running } = await (await api.fetchApi("/queue")).json();
  const still = running.find((one) => one[1] === shownBy.get(id) && isThis(one));
  if (still) return still[2];
  const kept = await keptRuns();
  const history = await (await api.fetchApi(`/history?max_items=${LOOK_BACK}`)).json();
  return Object.entries(history)
    .sort(([, a], [, b]) => b.prompt[0] - a.prompt[0])
    .find(([run, { prompt, outputs }]) => isThis(prompt) && (outputs[id] || kept[run]?.[id]))?.[1].prompt[2];
}

// Returns {id, prompt, workflow} of the current graph, or null if the node does not run. If only seeds differ from the
// node's latest run, the prompt has the seeds of that run: ComfyUI's page may have drawn new ones since.
export async function jobOf(node) {
  const { output: now, workflow } = await app.graphToPrompt();
  const id = Object.keys(now).find((key) => nodeOf(key) === node);
  if (!id) return null; // muted, or bypassed
  const ran = await latest(id, node.comfyClass);
  const same = ran && besideSeeds(branchOf(ran, [id])) === besideSeeds(branchOf(now, [id]));
  return { id, prompt: same ? { ...now, ...branchOf(ran, [id]) } : now, workflow };
}

// Returns the link to the VAE of the nearest node after the sampler that uses one; null if there is none.
export function vaeOf({ id, prompt }) {
  const seen = new Set();
  const waiting = [id];
  while (waiting.length) {
    const origin = waiting.shift();
    for (const [next, { inputs }] of Object.entries(prompt)) {
      if (seen.has(next) || !Object.values(inputs).some((v) => isLink(v) && v[0] === origin)) continue;
      if (isLink(inputs.vae)) return inputs.vae;
      seen.add(next);
      waiting.push(next);
    }
  }
  return null;
}

// Returns a prompt's node that runs the sampler's job on all devices and on one, and compares the pictures.
export function compares(sampler, vae) {
  const { class_type: kind, inputs } = sampler;
  if (OURS.includes(kind)) return { ...sampler, class_type: COMPARE, inputs: { ...inputs, vae } };
  return { ...sampler, class_type: "ProveSampler", inputs: { ...inputs, sampler_class: kind, vae } };
}

export const isOurs = ({ class_type: kind }) => OURS.includes(kind);

const ENDS = ["execution_success", "execution_error", "execution_interrupted"];

// Returns true if a queued prompt will not run: it was taken out of the queue, or ComfyUI has started again.
async function isGone(id) {
  const { queue_running: running, queue_pending: pending } = await (await api.fetchApi("/queue")).json();
  if ([...running, ...pending].some(([, one]) => one === id)) return false;
  return !(id in (await (await api.fetchApi(`/history/${id}`)).json()));
}

// Queues these nodes as a prompt, waits for its end and returns {end, outputs by id}. Throws if ComfyUI refuses the prompt;
// `end` is "" if it will not run.
// Listens before ComfyUI answers, since cached outputs arrive at once.
export async function run(output, workflow) {
  const heard = new Map(); // prompt id -> {end, outputs}
  const of = (id) => heard.get(id) ?? heard.set(id, { end: "", outputs: {} }).get(id);
  const listening = new AbortController();
  let look = () => {};
  const on = (event, note) =>
    api.addEventListener(
      event,
      ({ detail }) => {
        if (!detail?.prompt_id) return;
        note(of(detail.prompt_id), detail);
        look();
      },
      { signal: listening.signal },
    );
  const shows = ({ outputs }, { node, output: shown }) => shown && (outputs[node] = shown);
  on("executed", shows);
  on("parallel_sampling.run", shows);
  for (const end of ENDS) on(end, (one) => (one.end = end));
  try {
    const { prompt_id: id } = await api.queuePrompt(0, { output, workflow });
    await new Promise((resolve) => {
      look = () => of(id).end && resolve();
      look();
      const lookForIt = () => isGone(id).then((gone) => gone && resolve(), () => {}); // no answer: ask again later
      for (const event of ["status", "reconnected"]) api.addEventListener(event, lookForIt, { signal: listening.signal });
    });
    return of(id);
  } finally {
    listening.abort();
  }
}
