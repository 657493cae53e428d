// Draws a badge over samplers. During a run it shows the progress of each rank, unless the node has a panel of ours; after
// a run it shows the strategy, the seconds per step, and how that compares with one device.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyle, element } from "./lib/dom.js";
import { COMPARE, nodeOf, SAMPLER } from "./lib/graph.js";
import { holdersOf } from "./lib/parallel_graph.js";
import { STOCK, watchOutputs } from "./lib/outputs.js";
import { leftOf, MANY } from "./lib/progress.js";
import { openReport } from "./lib/report.js";
import { translate } from "./lib/said.js";
import { byVue } from "./lib/widgets.js";
import { say } from "./lib/words.js";

const SAMPLERS = [SAMPLER, COMPARE];
const DRAWN_BY_VUE = ".lg-node[data-node-id]";
const runs = new Map(); // node -> what its latest run told, whether that holds now, and its ranks while it runs

addStyle(`
.parallel-badge { position: absolute; bottom: 100%; right: 0; margin-bottom: 2px; padding: 1px 6px; border: 0; border-radius: 4px;
  white-space: nowrap; font: 12px sans-serif; color: var(--input-text); background: var(--comfy-input-bg); pointer-events: none; }
.parallel-badge:enabled { cursor: pointer; pointer-events: auto; }
`);

function wordsOf(node) {
  const { told, holds, ranks } = runs.get(node) ?? {};
  if (ranks) return progressOf(ranks);
  if (!told || !holds) return "";
  const { strategy, seconds, compared } = told;
  return [strategy, `${seconds} s per step`, compared].filter(Boolean).map(translate).join(" · ");
}

const inPercent = (progress) => `${Math.round(100 * progress)} %`;

function progressOf(ranks) {
  const counted = ranks.filter(({ progress }) => progress !== null);
  if (!counted.length) return translate(ranks[0].words);
  const least = Math.min(...counted.map(({ progress }) => progress));
  if (ranks.length > MANY) return `${ranks.length} × ${inPercent(least)}`;
  return counted.map(({ device, progress }) => `${device} ${inPercent(progress)}`).join(" · ");
}

// Returns true if a click on the badge opens the report. The samplers in SAMPLERS show theirs in a panel.
const opens = (node) => !SAMPLERS.includes(node.comfyClass) && Boolean(runs.get(node)?.output);

const drawn = new WeakMap(); // node -> where its badge is on the canvas, beside the node's place: [x, y, width, height]

// Adds a badge that the canvas draws. Vue reads a node's badges only once, so badgeOnPage draws an element there instead.
function badgeOnCanvas(node) {
  if (!globalThis.LGraphBadge || !node.badges) return;
  const { BADGE_FG_COLOR: fgColor, BADGE_BG_COLOR: bgColor } = globalThis.LiteGraph;
  node.badges.push(() => {
    const badge = new globalThis.LGraphBadge({ text: byVue() ? "" : wordsOf(node), fgColor, bgColor });
    const { draw } = badge;
    badge.draw = function (context, x, y) {
      drawn.set(node, [x, y, this.getWidth(context), this.height]);
      draw.call(this, context, x, y);
    };
    return badge;
  });
}

// Opens the report after a click on a badge. The badge lies above its node, so the canvas does not pass the click to it.
function openOnCanvas(event) {
  if (!runs.size || byVue()) return;
  const [x, y] = app.canvas.convertEventToCanvasOffset(event);
  const isOn = (node) => {
    const [left, top, width, height] = drawn.get(node) ?? [0, 0, 0, 0];
    const [right, below] = [x - node.pos[0] - left, y - node.pos[1] - top];
    return node.graph === app.canvas.graph && wordsOf(node) && right >= 0 && right <= width && below >= 0 && below <= height;
  };
  const node = [...runs.keys()].find((one) => opens(one) && isOn(one));
  if (node) openReport(node, runs.get(node).output);
}

const elements = new WeakMap(); // node -> its badge on the page

function badgeOnPage(node) {
  const box = byVue() && node.graph === app.canvas.graph && document.querySelector(`.lg-node[data-node-id="${node.id}"]`);
  const words = box ? wordsOf(node) : "";
  const badge = elements.get(node) ?? element("button", "parallel-badge");
  elements.set(node, badge);
  if (!words) return badge.remove();
  badge.type = "button";
  badge.textContent = words;
  badge.title = leftOf(runs.get(node).ranks ?? []) || say("open_report");
  badge.disabled = !opens(node);
  badge.onclick = () => openReport(node, runs.get(node).output);
  if (badge.parentElement !== box) box.append(badge);
}

function redraw(node) {
  badgeOnPage(node);
  node.setDirtyCanvas(true, true);
}

function begin(node) {
  badgeOnCanvas(node);
  const removed = node.onRemoved;
  node.onRemoved = function (...args) {
    runs.delete(node);
    return removed?.apply(this, args);
  };
}

// Updates the badge of a node, and of the subgraph nodes around it so that it is visible from outside.
function update(node, changes) {
  for (const one of [node, ...holdersOf(node.graph)]) {
    if (!runs.has(one)) begin(one);
    runs.set(one, { ...runs.get(one), ...changes });
    redraw(one);
  }
}

function show(node, output) {
  if (output.parallel_badge) update(node, { told: output.parallel_badge[0], output, holds: true, ranks: null });
}

// Hides the badge of an earlier run while a new one runs, and removes it if the new one fails or is cancelled.
function mark(node, state) {
  const lost = state === "failed" || state === "cancelled";
  update(node, { holds: state === "done", ranks: null, ...(lost ? { told: null, output: null } : {}) });
}

// Puts the badges back when Vue has made new elements for the nodes: it can do so at any time.
function keepOnPage() {
  new MutationObserver((changes) => {
    if (!runs.size || !byVue()) return;
    const drawn = changes.some(({ addedNodes }) =>
      [...addedNodes].some((one) => one.nodeType === 1 && (one.matches(DRAWN_BY_VUE) || one.querySelector(DRAWN_BY_VUE))),
    );
    if (drawn) for (const node of runs.keys()) badgeOnPage(node);
  }).observe(document.body, { childList: true, subtree: true });
}

app.registerExtension({
  name: "parallel_sampling.badge",

  setup() {
    for (const kind of [...SAMPLERS, STOCK]) watchOutputs(kind, show, mark);
    api.addEventListener("parallel_sampling.progress", ({ detail: { node: id, ranks } }) => {
      const node = nodeOf(id);
      if (node && !SAMPLERS.includes(node.comfyClass)) update(node, { ranks: ranks.length ? ranks : null });
    });
    app.canvas.canvas.addEventListener("click", openOnCanvas);
    keepOnPage();
  },
});
