// A badge over a sampler after a run: its strategy, seconds of a step, and how many times as fast that is as one device,
// "–" until that was measured.
import { app } from "../../scripts/app.js";
import { addStyle, element } from "./lib/dom.js";
import { watchOutputs } from "./lib/outputs.js";
import { say } from "./lib/words.js";

const SAMPLERS = ["ParallelSampler", "CompareWithOneDevice"];
const PANEL = "report_panel";
const TAG = "parallel-badge";
const runs = new WeakMap(); // node -> what its latest run told, and whether that holds now

addStyle(`
.parallel-badge { position: absolute; bottom: 100%; right: 0; margin-bottom: 2px; padding: 1px 6px; border-radius: 4px;
  white-space: nowrap; font: 12px sans-serif; color: var(--input-text); background: var(--comfy-input-bg); pointer-events: none; }
`);

function wordsOf(node) {
  const { told, holds } = runs.get(node) ?? {};
  if (!told || !holds) return "";
  const { strategy, seconds, unit, speed_up: times } = told;
  const time = `${Number(seconds.toPrecision(3))} ${say(unit === "step" ? "per_step" : "per_call")}`;
  const won = times === null ? [] : [times ? `${Number(times.toPrecision(2))} ×` : "–"];
  return [strategy, time, ...won].join(" · ");
}

const byVue = () => app.extensionManager?.setting.get("Comfy.VueNodes.Enabled");

// As the canvas draws badges. Nodes drawn by Vue never look at theirs again, so they get an element instead.
function canvasBadge(node) {
  const { BADGE_FG_COLOR: fgColor, BADGE_BG_COLOR: bgColor } = globalThis.LiteGraph;
  return () => new globalThis.LGraphBadge({ text: byVue() ? "" : wordsOf(node), fgColor, bgColor });
}

// In the node's panel, which ComfyUI puts onto the page with the node and takes off again; the badge goes with it.
class BadgeOfVue extends HTMLElement {
  connectedCallback() {
    requestAnimationFrame(() => this.draw());
  }

  disconnectedCallback() {
    this.badge?.remove();
  }

  draw() {
    const words = this.node ? wordsOf(this.node) : "";
    const box = this.closest("[data-node-id]");
    this.badge ??= element("div", TAG);
    this.badge.textContent = words;
    if (box && words) box.append(this.badge);
    else this.badge.remove();
  }
}
if (!customElements.get(TAG)) customElements.define(TAG, BadgeOfVue);

function redraw(node) {
  node.widgets?.find(({ name }) => name === PANEL)?.element.querySelector(TAG)?.draw();
  node.setDirtyCanvas(true, true);
}

function show(node, output) {
  if (!output.parallel_badge) return;
  runs.set(node, { told: output.parallel_badge[0], holds: true });
  redraw(node);
}

// Of the latest run and of no other.
function mark(node, state) {
  const { told } = runs.get(node) ?? {};
  const lost = state === "failed" || state === "cancelled";
  runs.set(node, { told: lost ? null : told, holds: state === "done" });
  redraw(node);
}

app.registerExtension({
  name: "parallel_sampling.badge",

  setup() {
    for (const kind of SAMPLERS) watchOutputs(kind, show, mark);
  },

  nodeCreated(node) {
    if (!SAMPLERS.includes(node.comfyClass)) return;
    if (globalThis.LGraphBadge) node.badges?.push(canvasBadge(node));
    // Once report_panel.js has made the panel, whichever of the two is asked first.
    queueMicrotask(() => {
      const anchor = Object.assign(document.createElement(TAG), { node });
      node.widgets?.find(({ name }) => name === PANEL)?.element.append(anchor);
    });
  },
});
