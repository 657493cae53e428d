// What is known of each way to split the latest run, as a table, the one that ran marked.
import { addStyle, element } from "./dom.js";

const EMPTY = "After a run: step time and memory of each way to split it.";
addStyle(`
.parallel-candidates table { border-collapse: collapse; width: 100%; }
.parallel-candidates caption, .parallel-candidates p { text-align: left; color: var(--descrip-text); margin: 4px; }
.parallel-candidates td { padding: 2px 4px; vertical-align: top; border-top: 1px solid var(--border-color); }
.parallel-candidates td:nth-child(2) { width: 45%; }
.parallel-candidates tr.chosen { font-weight: bold; background: var(--comfy-input-bg); }
.parallel-candidates tr.impossible { opacity: 0.55; }
.parallel-candidates meter { width: 100%; height: 6px; display: block; }
.parallel-candidates small { color: var(--descrip-text); font-weight: normal; }
`);

function cell(row, text, detail) {
  const td = row.insertCell();
  td.append(text);
  if (detail) td.append(document.createElement("br"), element("small", "", detail));
  return td;
}

export function drawCandidates(into, rows) {
  into.replaceChildren();
  if (!rows.length) {
    into.append(element("p", "", EMPTY));
    return;
  }
  const table = document.createElement("table");
  table.createCaption().textContent = "A step of the latest run, by strategy";
  const slowest = Math.max(...rows.map((r) => r.seconds ?? 0));
  for (const r of rows) {
    const tr = table.insertRow();
    tr.className = r.chosen ? "chosen" : r.possible ? "" : "impossible";
    if (r.chosen) tr.setAttribute("aria-current", "true");
    cell(tr, (r.chosen ? "→ " : "") + r.strategy, r.result);
    const time = cell(tr, r.step, r.how);
    if (r.seconds !== null) {
      const meter = document.createElement("meter");
      Object.assign(meter, { min: 0, max: slowest || 1, value: r.seconds, title: `${r.step} a step` });
      time.prepend(meter);
    }
    cell(tr, r.memory);
  }
  into.append(table);
}
