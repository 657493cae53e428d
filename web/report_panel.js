// Shows the report of a run in a panel under the pack's samplers; Compare With One Device has both pictures above it.
// During a run, rank_progress.js shows its bars in the same panel, above the report.
import { app } from "../../scripts/app.js";
import { button } from "./lib/button.js";
import { drawComparison } from "./lib/comparison.js";
import { addPanel, addStyle, element, makeScrollable } from "./lib/dom.js";
import { COMPARE, SAMPLER } from "./lib/graph.js";
import { forgetPhase, watchOutputs } from "./lib/outputs.js";
import { prove } from "./lib/prove.js";
import { drawPhases, drawTimeline } from "./lib/timeline.js";
import { say } from "./lib/words.js";
import { translate } from "./lib/said.js";

const PANEL = "report_panel";
const EMPTY = "After a run: what ran, where, why, and how long.";
// Pixels. A preview on the node takes all height beyond the panel's minimum; a new node shows most of a report.
const MIN_HEIGHT = { report: 140, pictures: 360 };
const NEW_NODE = { width: 300, more: { report: 20, pictures: 100 } };
const STYLE = `
.parallel-run { display: flex; flex-direction: column; height: 100%; min-height: 0; overflow: auto; box-sizing: border-box;
  font: 11px sans-serif; color: var(--input-text); }
.parallel-run header { display: flex; gap: 4px; align-items: start; margin: 0 0 2px; }
.parallel-headline { flex: 1 1 0; min-width: 0; font-weight: bold; padding: 2px 4px; overflow-wrap: anywhere; user-select: text; }
.parallel-run > .parallel-comparison { flex: 4 1 0; }
.parallel-fold { flex: 1 1 0; min-height: 40px; overflow: auto; background: var(--comfy-menu-bg); border-radius: 4px; }
.parallel-fold:focus-visible, .parallel-fold summary:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); }
.parallel-fold summary { cursor: pointer; padding: 2px 4px; }
.parallel-report { margin: 0; padding: 4px; font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; user-select: text; }
.parallel-report.empty { color: var(--parallel-muted); }
.parallel-report.problem { color: var(--parallel-error); }
`;

const INSTEAD = {
  running: "Running: its report comes at the end.",
  cancelled: "The latest run was cancelled.",
  failed: "The latest run failed.",
};

const panelOf = (node) => node.widgets?.find((widget) => widget.name === PANEL)?.element;

function show(node, output) {
  const panel = panelOf(node);
  if (!panel || !output.text) return;
  panel.run = output;
  mark(node, "done");
  forgetPhase(node); // the headline says it
}

// Shows the report of the latest run, or why there is none; never that of an earlier run.
function mark(node, state, words) {
  const panel = panelOf(node);
  if (!panel) return;
  if (state === "failed" || state === "cancelled") panel.run = null;
  const run = state === "done" ? panel.run : null;
  const report = panel.querySelector(".parallel-report");
  report.textContent = translate((state === "failed" && words) || INSTEAD[state] || ([].concat(run?.text ?? []).join("\n\n") || EMPTY));
  report.classList.toggle("empty", !run);
  report.classList.toggle("problem", state === "failed");
  fold(panel, Boolean(run));
  panel.querySelector(".parallel-headline").textContent = translate(run?.parallel_headline?.[0] ?? "");
  for (const drawn of panel.querySelectorAll(".parallel-comparison, .parallel-timeline, .parallel-phases")) drawn.remove();
  const timeline = run?.parallel_timeline?.[0];
  const folded = panel.querySelector(".parallel-fold");
  const phases = run?.parallel_phases?.[0];
  if (phases?.phases.length) folded.before(drawPhases(phases));
  if (timeline) folded.before(drawTimeline(timeline));
  const told = node.comfyClass === COMPARE && run?.parallel_comparison?.[0];
  if (told) folded.before(drawComparison(told));
}

// Folds the report below the headline, or opens it if the person left it open. Without a run, the only line is open.
function fold(panel, hasRun) {
  const [all, summary] = [panel.querySelector(".parallel-fold > details"), panel.querySelector(".parallel-fold summary")];
  if (!summary.hidden) panel.wanted = all.open;
  summary.hidden = !hasRun;
  all.open = !hasRun || Boolean(panel.wanted);
}

app.registerExtension({
  name: "parallel_sampling.report_panel",

  setup() {
    addStyle(STYLE);
    for (const kind of [SAMPLER, COMPARE]) watchOutputs(kind, show, mark);
  },

  nodeCreated(node) {
    if (![COMPARE, SAMPLER].includes(node.comfyClass)) return;
    const shows = node.comfyClass === COMPARE ? "pictures" : "report";
    const summary = element("summary", "", say("whole_report"));
    const all = element("details", "", summary, element("pre", "parallel-report empty", translate(EMPTY)));
    summary.hidden = all.open = true;
    const header = element("header", "", element("div", "parallel-headline"));
    const panel = element("div", "parallel-run", header, makeScrollable(element("div", "parallel-fold", all), say("open_report")));
    if (shows === "report") {
      const made = button(say("prove"), () => prove(node));
      made.title = say("prove_hint");
      header.append(made);
    }
    addPanel(node, PANEL, panel, MIN_HEIGHT[shows]);
    node.setSize([Math.max(node.size[0], NEW_NODE.width), node.computeSize()[1] + NEW_NODE.more[shows]]);
  },
});
