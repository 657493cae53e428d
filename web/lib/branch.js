// The job of one sampler, out of the prompt that the graph makes: the nodes that it needs and no others.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { nodeOf, rootGraph } from "./graph.js";
import { keptRuns } from "./outputs.js";

const LOOK_BACK = 16; // prompts of the history
const SEEDS = ["seed", "noise_seed"];
const OURS = ["ParallelSampler", "CompareWithOneDevice"];

const isLink = (value) => Array.isArray(value) && value.length === 2 && typeof value[1] === "number";

// Of a prompt's nodes those that `ids` need, with them.
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

// What a prompt says of a node, its seeds left out.
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

// Execution id of a node -> the prompt that it showed something of last. ComfyUI's history has a prompt once it has ended.
const shownBy = new Map();
for (const event of ["executed", "parallel_sampling.run"])
  api.addEventListener(event, ({ detail }) => detail?.output && shownBy.set(detail.node, detail.prompt_id));

// The latest prompt of this very workflow that ran this node as it is, and perhaps still runs others.
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

// {id, prompt, workflow}: the prompt of the graph as it stands. Where nothing but seeds differs from the node's latest run
// it has that run's: after a run ComfyUI's page may have drawn the next ones.
export async function jobOf(node) {
  const { output: now, workflow } = await app.graphToPrompt();
  const id = Object.keys(now).find((key) => nodeOf(key) === node);
  if (!id) return null; // muted, or bypassed
  const ran = await latest(id, node.comfyClass);
  const same = ran && besideSeeds(branchOf(ran, [id])) === besideSeeds(branchOf(now, [id]));
  return { id, prompt: same ? { ...now, ...branchOf(ran, [id]) } : now, workflow };
}

// The VAE that decodes a job's latent, as the nodes that follow have it; null where none does.
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

// A sampler of a prompt as the node that runs its job on one device too.
export function compares(sampler, vae) {
  const { class_type: kind, inputs } = sampler;
  if (OURS.includes(kind)) return { ...sampler, class_type: "CompareWithOneDevice", inputs: { ...inputs, vae } };
  return { ...sampler, class_type: "ProveSampler", inputs: { ...inputs, sampler_class: kind, vae } };
}

export const isOurs = ({ class_type: kind }) => OURS.includes(kind);

const ENDS = ["execution_success", "execution_error", "execution_interrupted"];

// Queues these nodes as a prompt and waits for its end: {end, outputs by id}. Throws what ComfyUI refuses. Listens before
// ComfyUI answers: what it has in its cache is there at once.
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
    });
    return of(id);
  } finally {
    listening.abort();
  }
}
