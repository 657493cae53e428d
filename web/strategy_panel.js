// The panel under Strategy Selector: what the latest run foresaw of each way to split it, the chosen one marked.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const SELECTOR = "StrategySelector";
const SAMPLER = "ParallelSampler";
const PANEL = "candidates";
const EMPTY = "After a run: step time and memory of each way to split it.";
const ROW_HEIGHT = 30; // pixels
const STYLE = `
.parallel-candidates { font: 11px sans-serif; color: var(--input-text); overflow: auto; height: 100%; }
.parallel-candidates table { border-collapse: collapse; width: 100%; }
.parallel-candidates caption, .parallel-candidates p { text-align: left; color: var(--descrip-text); margin: 4px; }
.parallel-candidates td { padding: 2px 4px; vertical-align: top; border-top: 1px solid var(--border-color); }
.parallel-candidates td:nth-child(2) { width: 45%; }
.parallel-candidates tr.chosen { font-weight: bold; background: var(--comfy-input-bg); }
.parallel-candidates tr.impossible { opacity: 0.55; }
.parallel-candidates meter { width: 100%; height: 6px; display: block; }
.parallel-candidates small { color: var(--descrip-text); font-weight: normal; }
`;

function cell(row, text, detail) {
  const td = row.insertCell();
  td.append(text);
  if (detail) {
    const small = document.createElement("small");
    small.textContent = detail;
    td.append(document.createElement("br"), small);
  }
  return td;
}

function draw(panel, rows) {
  panel.replaceChildren();
  if (!rows.length) {
    panel.append(Object.assign(document.createElement("p"), { textContent: EMPTY }));
    return;
  }
  const table = document.createElement("table");
  table.createCaption().textContent = "A step of the latest run, by strategy";
  const slowest = Math.max(...rows.map((r) => r.seconds));
  for (const r of rows) {
    const tr = table.insertRow();
    tr.className = r.chosen ? "chosen" : r.possible ? "" : "impossible";
    if (r.chosen) tr.setAttribute("aria-current", "true");
    cell(tr, (r.chosen ? "→ " : "") + r.strategy, r.result);
    const time = cell(tr, r.step, r.how);
    const meter = document.createElement("meter");
    Object.assign(meter, { min: 0, max: slowest || 1, value: r.seconds, title: `${r.step} a step` });
    time.prepend(meter);
    cell(tr, r.memory);
  }
  panel.append(table);
}

function originOf(node, inputName) {
  const slot = node?.inputs?.findIndex((input) => input.name === inputName) ?? -1;
  return slot < 0 ? null : node.getInputNode(slot);
}

// The selector that decided for this sampler: its own, else its loader's.
function selectorOf(sampler) {
  const own = originOf(sampler, "strategy") ?? originOf(originOf(sampler, "parallel_model"), "strategy");
  return own?.comfyClass === SELECTOR ? own : null;
}

// Execution ids name the way through subgraphs: "12:3" is node 3 in the subgraph node 12.
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

app.registerExtension({
  name: "parallel_sampling.strategy_panel",

  setup() {
    document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
    api.addEventListener("executed", ({ detail }) => {
      const rows = detail?.output?.parallel_candidates;
      const sampler = rows && nodeOf(detail.display_node ?? detail.node);
      const selector = sampler?.comfyClass === SAMPLER ? selectorOf(sampler) : null;
      const widget = selector?.widgets?.find((w) => w.name === PANEL);
      if (!widget) return;
      draw(widget.element, rows);
      selector.setDirtyCanvas(true, true);
    });
  },

  nodeCreated(node) {
    if (node.comfyClass !== SELECTOR) return;
    const panel = document.createElement("div");
    panel.className = "parallel-candidates";
    draw(panel, []);
    node.addDOMWidget(PANEL, PANEL, panel, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => 4 * ROW_HEIGHT,
    });
  },
});
