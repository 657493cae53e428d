// "One image per GPU" in the panel of Parallel Sampler: offered while prompts wait that differ only by its seed, and off
// until a person wants it. Which ones those are the server tells (nodes/together/offer.py).
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { button } from "./button.js";
import { addStyle, element } from "./dom.js";
import { nodeOf, rootGraph } from "./graph.js";
import { say } from "./words.js";
import { translate } from "./said.js";

const ROUTE = "/parallel_sampling/waiting";
const SETTING = "parallel_sampling.one_image_per_gpu";
const PAUSE = 200; // ms after the queue has changed
const boxes = new Map(); // node -> its element
let timer = 0;
let asked = 0;

addStyle(`
.parallel-waiting { flex: 0 0 auto; padding: 2px 4px 4px; }
.parallel-waiting:empty { display: none; }
.parallel-waiting p { margin: 0 0 4px; overflow-wrap: anywhere; }
.parallel-waiting small { color: var(--descrip-text); }
`);

// The place for it in the node's panel.
export function waitingBox(node) {
  const box = element("div", "parallel-waiting");
  boxes.set(node, box);
  return box;
}

function forget(node) {
  boxes.get(node)?.remove();
  boxes.delete(node);
}

async function turn(on) {
  await app.extensionManager.setting.set(SETTING, on);
  await ask();
}

function draw(box, on, { waiting, why_not: whyNot }) {
  const told = say(on ? "together_on" : "together_offer", { count: waiting });
  if (whyNot) return box.replaceChildren(element("p", "", told), element("small", "", translate(`Not now: ${whyNot}`)));
  const made = button(say(on ? "together_stop" : "together_start"), () => turn(!on));
  box.replaceChildren(element("p", "", told), made, element("p", "", element("small", "", say("together_hint"))));
}

async function ask() {
  for (const node of [...boxes.keys()]) if (!node.graph) forget(node);
  if (!boxes.size) return;
  const number = ++asked;
  const answer = await api.fetchApi(ROUTE);
  if (!answer.ok || number !== asked) return; // a later one is under way
  const { on, workflow, nodes } = await answer.json();
  const shown = workflow === rootGraph()?.id ? Object.entries(nodes) : [];
  const offers = new Map(shown.map(([id, offer]) => [nodeOf(id), offer]));
  for (const [node, box] of boxes) {
    if (offers.has(node)) draw(box, on, offers.get(node));
    else box.replaceChildren();
  }
}

api.addEventListener("status", ({ detail }) => {
  const isShown = [...boxes.values()].some((box) => box.childElementCount);
  if (!isShown && !(detail?.exec_info?.queue_remaining > 1)) return;
  clearTimeout(timer);
  timer = setTimeout(() => ask().catch((error) => console.warn("parallel sampling: the queue does not answer", error)), PAUSE);
});
