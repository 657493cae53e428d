// Offers to make text encoders and VAEs parallel too, if their nodes took a good part of the last prompt's time, or if text
// encoder and model do not fit ComfyUI's device together. Stores the person's choice.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { button } from "./button.js";
import { openDialog } from "./dialog.js";
import { element } from "./dom.js";
import { nodeOf, rootGraph } from "./graph.js";
import { graphs } from "./graph_changes.js";
import { ENCODERS_TOO, hasStockEncoders, STOCK_VAES } from "./parallel_graph.js";
import { say } from "./words.js";

const REFUSED = "parallel_sampling.keep_encoders"; // in the browser's storage
const WORTH = 0.2; // of a prompt's time
const GIB = 2 ** 30;

// The last prompt's graph, and the ms that all its nodes took, and those that encode texts or use a VAE.
const spent = { graph: null, all: 0, beside: 0 };
let running = null; // {id, since}

function isBeside(node) {
  const encodes = node?.inputs?.some(({ type }) => type === "CLIP") && node.outputs?.some(({ type }) => type === "CONDITIONING");
  return Boolean(encodes) || STOCK_VAES.includes(node?.comfyClass);
}

api.addEventListener("execution_start", () => {
  Object.assign(spent, { graph: rootGraph()?.id, all: 0, beside: 0 });
  running = null;
});
api.addEventListener("executing", ({ detail: id }) => {
  const now = performance.now();
  if (spent.graph !== rootGraph()?.id) spent.graph = null; // another workflow is shown: which nodes ran is unknown
  if (running) {
    spent.all += now - running.since;
    if (isBeside(nodeOf(running.id))) spent.beside += now - running.since;
  }
  running = id == null ? null : { id, since: now };
});

// Returns the bytes of the files in a model folder that are chosen in widgets whose name matches `called`.
async function sizeOf(folder, called) {
  const widgets = graphs().flatMap((graph) => graph.nodes.flatMap((node) => node.widgets ?? []));
  const files = widgets.filter(({ name }) => called.test(name)).map(({ value }) => value);
  const answer = await api.fetchApi(`/experiment/models/${folder}`);
  const known = answer.ok ? await answer.json() : [];
  return known.filter(({ name }) => files.includes(name)).reduce((sum, { size }) => sum + size, 0);
}

async function tooLarge() {
  const { devices } = await (await api.fetchApi("/system_stats")).json();
  if (!devices?.length || devices[0].type === "cpu") return "";
  const sizes = [await sizeOf("text_encoders", /^clip_name\d*$/), await sizeOf("diffusion_models", /^unet_name$/), devices[0].vram_total];
  const [encoder, model, device] = sizes.map((size) => (size / GIB).toFixed(1));
  return sizes[0] && sizes[1] && sizes[0] + sizes[1] > sizes[2] ? say("too_by_memory", { encoder, model, device }) : "";
}

async function reasons() {
  const share = spent.all && spent.graph === rootGraph().id ? spent.beside / spent.all : 0;
  const byTime = share >= WORTH ? say("too_by_time", { share: Math.round(100 * share) }) : "";
  return [byTime, await tooLarge().catch(() => "")].filter(Boolean);
}

// Returns true to make the workflow parallel: if there is nothing to offer, or if the person agrees in the dialog.
export async function offerEncoders() {
  const settings = app.extensionManager.setting;
  if (settings.get(ENCODERS_TOO) || localStorage.getItem(REFUSED) || !hasStockEncoders()) return true;
  const why = await reasons();
  if (!why.length) return true;
  const { dialog, text, buttons } = openDialog(say("make_parallel"), why.join("\n"));
  const too = Object.assign(element("input"), { type: "checkbox", checked: true });
  text.after(element("label", "", too, ` ${say("too_switch")}`));
  return new Promise((resolve) => {
    const make = button(say("too_go"), async () => {
      if (too.checked) await settings.set(ENCODERS_TOO, true);
      else localStorage.setItem(REFUSED, "1");
      resolve(true);
      dialog.close();
    });
    buttons.prepend(make);
    dialog.addEventListener("close", () => resolve(false)); // of a promise that is settled already this says nothing
  });
}
