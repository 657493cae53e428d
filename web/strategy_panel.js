// Draws the panel under Strategy Selector: problems of its inputs, which device does what, and after a run the time and
// memory of each way to split it. The backend has the rules and writes the texts; this file requests and shows them.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button } from "./lib/button.js";
import { drawCandidates } from "./lib/candidates.js";
import { DevicePicker } from "./lib/devices.js";
import { drawCases } from "./lib/diagram.js";
import { addPanel, addStyle, element, makeScrollable } from "./lib/dom.js";
import {
  captureState, followersOf, isLinked, loaderOf, nodeOf, nodesOf, originOf, SAMPLER, sourceOf, valueAt,
} from "./lib/graph.js";
import { measureRows } from "./lib/measure.js";
import { STOCK, watchOutputs } from "./lib/outputs.js";
import { tell } from "./lib/tell.js";
import { byVue, disableWidget, markRows, markWidget, plainLabel } from "./lib/widgets.js";
import { say } from "./lib/words.js";
import { translate } from "./lib/said.js";

const SELECTOR = "StrategySelector";
const BEHIND = "ParallelModel"; // a loader whose file is another one's
const ROUTE = "/parallel_sampling/check_strategy";
const PANEL = "strategy_panel";
const DEVICES = "devices"; // the input beside which devices can be chosen
const PAUSE = 150; // ms after the last edit
const MIN_HEIGHT = 120; // pixels
const NEW_NODE = { width: 300, more: 120 }; // pixels; a new one is taller than it must be, to show all of a small diagram
const panels = new WeakMap(); // selector -> its panel

const STYLE = `
.parallel-strategy { font: 11px sans-serif; color: var(--input-text); overflow: auto; height: 100%; box-sizing: border-box;
  padding: 2px; background: var(--comfy-menu-bg); border-radius: 4px; }
.parallel-strategy:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); }
.parallel-strategy p { margin: 4px; overflow-wrap: anywhere; }
.parallel-strategy details { margin: 4px; }
.parallel-strategy summary { cursor: pointer; }
.parallel-strategy .basis, .parallel-strategy .notes { color: var(--parallel-muted); }
.parallel-strategy [role="alert"] p { color: var(--parallel-error); border-left: 3px solid var(--parallel-error); padding-left: 6px;
  white-space: pre-line; }
.parallel-strategy [role="alert"] button { margin: 0 4px 4px; }
.parallel-strategy .outdated { opacity: 0.75; }
`;

// Returns the selector that decides for this sampler: its own, otherwise its loader's. Null if there is none.
function selectorOf(sampler) {
  const own = originOf(sampler, "strategy") ?? originOf(loaderOf(sampler), "strategy");
  return own?.comfyClass === SELECTOR ? own : null;
}

// Returns the first loader for which this selector decides, or null.
function loaderFor(selector) {
  for (const follower of followersOf(selector, "strategy")) {
    const loader = loaderOf(follower);
    if (loader) return loader;
  }
  return null;
}

// Returns the names of the inputs whose value is unknown until another node has run.
function unknownInputs(node) {
  return (node.inputs ?? [])
    .filter((input) => input.widget && input.link != null && valueAt(node, input.name) === undefined)
    .map((input) => input.widget.name);
}

// Returns the widgets of the node's inputs, without others such as panels.
function ownWidgets(node) {
  const { required, optional } = node.constructor.nodeData.input;
  const names = new Set(Object.keys({ ...required, ...optional }));
  return (node.widgets ?? []).filter((widget) => names.has(widget.name));
}

const widgetOf = (node, name) => ownWidgets(node).find((widget) => widget.name === name);
const labelOf = (node, name) => plainLabel(widgetOf(node, name)) ?? name;

// Returns the value of each input by name: from a linked node if it holds one, otherwise from the widget.
function inputsOf(node) {
  return Object.fromEntries(ownWidgets(node).map(({ name, value }) => [name, valueAt(node, name) ?? value]));
}

function question(node, unknown) {
  const loader = loaderFor(node);
  const source = loader?.comfyClass === BEHIND ? sourceOf(loader) : null;
  const named = source ?? loader;
  const valueOf = (name) => valueAt(named, name) ?? named.widgets?.find((widget) => widget.name === name)?.value ?? undefined;
  const inputs = Object.entries(inputsOf(node)).filter(([name]) => !unknown.includes(name));
  return JSON.stringify({
    inputs: Object.fromEntries(inputs),
    loader: loader
      ? {
          node: loader.comfyClass,
          source: source?.comfyClass,
          unet_name: valueOf("unet_name") ?? valueOf("model_name") ?? valueOf("ckpt_name"),
          weight_dtype: valueOf("weight_dtype"),
        }
      : {},
  });
}

// Returns the part of an answer that holds for all values of the unknown inputs: the backend assumed their defaults.
function withoutUnknown(said, unknown) {
  if (!unknown.length) return said;
  const note = `${unknown.join(", ")} comes from another node: checked when the graph runs.`;
  const decides = unknown.some((name) => name === "mode" || name === "devices");
  const certain = ({ inputs }) => !decides && !inputs.some((name) => unknown.includes(name));
  return { problems: (said.problems ?? []).filter(certain), decided: decides ? [] : said.decided, notes: [note] };
}

// Removes the errors of ComfyUI's validation from the node, as ComfyUI itself does once a number is back in its range.
function forgetRefusal(node) {
  const errors = app.lastNodeErrors ?? {};
  for (const id of Object.keys(errors)) if (nodeOf(id) === node && errors[id].refused) delete errors[id];
}

// Folds away the inputs that auto decides, and shows them in other modes. Nodes drawn by Vue have their own button for
// this; on the canvas ComfyUI would leave empty rows, so hideOnCanvas hides the widgets.
function fold(node) {
  node.showAdvanced = inputsOf(node).mode !== "auto";
  hideOnCanvas(node);
  if (node.showAdvanced) node.expandToFitContent?.();
}

function hideOnCanvas(node) {
  const hidden = !byVue() && inputsOf(node).mode === "auto";
  for (const widget of ownWidgets(node)) if (widget.options?.advanced) widget.hidden = hidden;
}

class Panel {
  constructor(node) {
    this.node = node;
    this.problems = element("div");
    this.problems.setAttribute("role", "alert");
    this.basis = element("p", "basis");
    this.layout = element("div", "parallel-diagram");
    this.notes = element("div", "notes");
    this.candidates = element("div", "parallel-candidates");
    this.picker = new DevicePicker({
      text: () => (unknownInputs(node).includes(DEVICES) ? undefined : inputsOf(node)[DEVICES]),
      isLinked: () => isLinked(node, DEVICES),
      isThere: () => nodesOf(SELECTOR).includes(node), // a node keeps its graph when the graph is cleared
      write: (text) => this.apply({ [DEVICES]: text }),
    });
    this.root = element("div", "parallel-strategy", this.problems, this.picker.root, this.basis, this.layout, this.notes);
    this.root.append(this.candidates);
    makeScrollable(this.root, translate("How the devices share the work"));
    drawCandidates(this.candidates, []);
    this.asked = null; // the question whose answer is shown or under way
    this.run = null; // the layout of the latest run, with the inputs that it had
    this.foreseen = { basis: "", layout: [] };
  }

  askSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), PAUSE);
  }

  async ask() {
    if (!this.node.graph) return; // taken out since
    const unknown = unknownInputs(this.node);
    const asking = question(this.node, unknown);
    if (asking === this.asked) return;
    this.asked = asking;
    let said;
    try {
      const answer = await api.fetchApi(ROUTE, { method: "POST", body: asking });
      said = await answer.json();
      if (said.error) said = { problems: [{ inputs: [], message: said.error }] };
    } catch (error) {
      said = { problems: [{ inputs: [], message: `ComfyUI did not answer: ${error}` }] };
      if (asking === this.asked) this.asked = null; // worth another try
    }
    if (asking === (this.asked ?? asking)) this.show(withoutUnknown(said, unknown)); // else a later one is under way
  }

  show({ problems = [], nearest = {}, decided = [], basis = "", layout = [], notes = [], memory = "" }) {
    this.problems.replaceChildren(...problems.map(({ message }) => this.inWords(message)), ...this.remedy(nearest));
    this.notes.replaceChildren(...[...notes, memory].filter(Boolean).map((note) => this.inWords(note)));
    this.foreseen = { basis, layout };
    this.drawLayout();
    if (!problems.length) forgetRefusal(this.node);
    hideOnCanvas(this.node); // who draws the nodes may be another one now
    const wrong = new Set(problems.flatMap(({ inputs }) => inputs));
    for (const widget of ownWidgets(this.node)) {
      markWidget(widget, wrong.has(widget.name));
      disableWidget(widget, decided.includes(widget.name));
    }
    requestAnimationFrame(() => markRows(this.root));
    this.node.setDirtyCanvas(true, true);
  }

  // Returns an element with the message, and with labels for input names. Names that are also words, such as devices, stay.
  inWords(message) {
    let words = translate(message);
    for (const { name } of ownWidgets(this.node)) {
      if (name.includes("_")) words = words.replaceAll(new RegExp(`\\b${name}\\b`, "g"), () => labelOf(this.node, name));
    }
    const [first, ...rest] = words.split("\n");
    if (!rest.length) return element("p", "", words);
    return element("details", "", element("summary", "", first), element("p", "", rest.join("\n")));
  }

  // Returns a list with a button that applies the nearest settings that can run; empty if none are known.
  remedy(nearest) {
    const words = Object.entries(nearest).map(([name, value]) => `${labelOf(this.node, name)} ${value}`);
    if (!words.length) return [];
    return [button(translate(`Apply ${words.join(", ")}`), () => this.apply(nearest))];
  }

  // Sets these inputs as one step of undo.
  apply(inputs) {
    for (const widget of ownWidgets(this.node)) {
      if (!(widget.name in inputs) || widget.value === inputs[widget.name]) continue;
      widget.value = inputs[widget.name];
      widget.callback?.(widget.value);
    }
    captureState();
  }

  // Shows the output of a run. `sampler`: the node that ran.
  showRun(output, sampler) {
    this.latest = output;
    this.sampler = sampler;
    const { parallel_layout: layout = [], parallel_candidates: rows = [] } = output;
    this.run = layout[0];
    this.rows = rows.map((row) => ({ ...row })); // what is measured later belongs to the panel
    this.drawRows();
    this.drawLayout();
    this.node.setDirtyCanvas(true, true);
  }

  drawRows(progress = "") {
    const apply = (row) => this.apply(row.inputs);
    drawCandidates(this.candidates, this.rows, { apply, measure: (rows) => this.measure(rows), progress });
  }

  // Measures the strategies without a time, and shows each time in its row as soon as it is known.
  async measure(rows) {
    const { rows: shown } = this;
    const go = (at) => shown === this.rows && this.drawRows(at < rows.length ? say("measuring", { at: at + 1, of: rows.length }) : "");
    go(0);
    try {
      await measureRows(this.sampler, this.node, rows, (row, result, at) => {
        const { seconds, step, how } = result ?? { seconds: null, step: "", how: say("measuring_failed") };
        Object.assign(row, { seconds, step, how, possible: row.possible && Boolean(result) });
        go(at + 1);
      });
    } catch (error) {
      tell("warn", error.message, { life: 10_000 });
    }
    go(rows.length);
  }

  // Clears what an earlier run showed. If the new run ends without an output, the earlier one holds and is shown again.
  markRun(state, sampler) {
    const { latest } = this;
    this.showRun(state === "done" ? (latest ?? {}) : {}, sampler);
    if (state === "running") this.latest = latest;
  }

  // Draws what ran if no input has changed since, otherwise what would run.
  drawLayout() {
    const own = inputsOf(this.node);
    const current = this.run && Object.entries(this.run.inputs).every(([name, value]) => own[name] === value);
    this.candidates.classList.toggle("outdated", Boolean(this.run) && !current);
    this.basis.textContent = translate(current ? "The latest run" : this.foreseen.basis);
    drawCases(this.layout, current ? [this.run] : this.foreseen.layout);
  }
}

function chain(object, name, then) {
  const before = object[name];
  object[name] = function (...args) {
    const result = before?.apply(this, args);
    then(...args);
    return result;
  };
}

app.registerExtension({
  name: "parallel_sampling.strategy_panel",

  setup() {
    addStyle(STYLE);
    for (const kind of [SAMPLER, STOCK]) {
      watchOutputs(kind, (sampler, output) => {
        if (output.parallel_candidates || output.parallel_layout) panels.get(selectorOf(sampler))?.showRun(output, sampler);
      }, (sampler, state) => panels.get(selectorOf(sampler))?.markRun(state, sampler));
    }
    // Covers other changes in the graph: undo, links, another file in the loader.
    api.addEventListener("graphChanged", () => {
      for (const node of nodesOf(SELECTOR)) panels.get(node)?.askSoon();
    });
  },

  nodeCreated(node) {
    if (node.comfyClass !== SELECTOR) return;
    const panel = new Panel(node);
    panels.set(node, panel);
    const askSoon = () => panel.askSoon();
    for (const widget of ownWidgets(node)) chain(widget, "callback", askSoon);
    chain(widgetOf(node, "mode"), "callback", () => fold(node));
    chain(node, "onConfigure", (saved) => (saved.showAdvanced === undefined ? fold(node) : hideOnCanvas(node)));
    fold(node);
    for (const event of ["onConfigure", "onConnectionsChange", "onAdded"]) chain(node, event, askSoon);
    addPanel(node, PANEL, panel.root, MIN_HEIGHT);
    node.setSize([Math.max(node.size[0], NEW_NODE.width), node.computeSize()[1] + NEW_NODE.more]);
    askSoon();
  },
});
