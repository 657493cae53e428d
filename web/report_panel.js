// Under Parallel Sampler, after a run: its report. What is shown while it runs belongs above it, in the same panel.
import { app } from "../../scripts/app.js";
import { addPanel, addStyle, element, makeScrollable } from "./lib/dom.js";
import { watchOutputs } from "./lib/outputs.js";

const SAMPLER = "ParallelSampler";
const PANEL = "report_panel";
const EMPTY = "After a run: what ran, where, why, and how long.";
const MIN_HEIGHT = 60; // pixels
const NEW_NODE = { width: 300, more: 100 }; // pixels; a new one is taller than it must be, to show most of a report
const STYLE = `
.parallel-run { display: flex; flex-direction: column; height: 100%; min-height: 0; box-sizing: border-box;
  font: 11px sans-serif; color: var(--input-text); }
.parallel-headline { font-weight: bold; padding: 0 4px 2px; overflow-wrap: anywhere; user-select: text; }
.parallel-headline:empty { display: none; }
.parallel-report { flex: 1 1 0; min-height: 0; overflow: auto; margin: 0; padding: 4px; font: inherit; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--comfy-menu-bg); border-radius: 4px; user-select: text; }
.parallel-report:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); }
.parallel-report.empty { color: var(--descrip-text); }
`;

const INSTEAD = {
  running: "Running: its report comes at the end.",
  cancelled: "The latest run was cancelled.",
  failed: "The latest run failed.",
};

function reportOf(node) {
  return node.widgets?.find((widget) => widget.name === PANEL)?.element.querySelector(".parallel-report");
}

function show(node, output) {
  const report = reportOf(node);
  if (!report || !output.text) return;
  report.own = [].concat(output.text).join("\n\n");
  report.previousSibling.own = output.parallel_headline?.[0] ?? "";
  mark(node, "done");
}

// Of the latest run and of no other: what it says of itself, or why it says nothing.
function mark(node, state) {
  const report = reportOf(node);
  if (!report) return;
  if (state === "failed" || state === "cancelled") report.own = "";
  report.textContent = INSTEAD[state] ?? (report.own || EMPTY);
  report.previousSibling.textContent = state === "done" && report.own ? report.previousSibling.own : "";
  report.classList.toggle("empty", state !== "done" || !report.own);
}

app.registerExtension({
  name: "parallel_sampling.report_panel",

  setup() {
    addStyle(STYLE);
    watchOutputs(SAMPLER, show, mark);
  },

  nodeCreated(node) {
    if (node.comfyClass !== SAMPLER) return;
    const report = makeScrollable(element("pre", "parallel-report empty", EMPTY), "Report of the latest run");
    const headline = element("div", "parallel-headline");
    headline.own = "";
    addPanel(node, PANEL, element("div", "parallel-run", headline, report), MIN_HEIGHT);
    node.setSize([Math.max(node.size[0], NEW_NODE.width), node.computeSize()[1] + NEW_NODE.more]);
  },
});
