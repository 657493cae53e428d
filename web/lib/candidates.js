// Draws a table of the ways to split the latest run, with the one that ran marked. A click on a row sets that strategy by
// hand; a button measures those without a time.
import { button } from "./button.js";
import { addStyle, element } from "./dom.js";
import { say } from "./words.js";
import { translate } from "./said.js";

const EMPTY = "After a run: step time and memory of each way to split it.";
addStyle(`
.parallel-candidates table { border-collapse: collapse; width: 100%; }
.parallel-candidates caption, .parallel-candidates p { text-align: left; color: var(--parallel-muted); margin: 4px; }
.parallel-candidates td { padding: 2px 4px; vertical-align: top; border-top: 1px solid var(--border-color); }
.parallel-candidates td:nth-child(2) { width: 45%; }
.parallel-candidates tr.chosen { font-weight: bold; background: var(--comfy-input-bg); }
.parallel-candidates tr.impossible { opacity: 0.75; }
.parallel-candidates tr:not(.impossible) { cursor: pointer; }
.parallel-candidates tr:not(.impossible):hover { background: var(--comfy-input-bg); }
.parallel-candidates meter { width: 100%; height: 6px; display: block; }
.parallel-candidates small { color: var(--parallel-muted); font-weight: normal; }
.parallel-candidates td > button { all: unset; cursor: inherit; }
.parallel-candidates td > button:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); }
.parallel-candidates .parallel-button { margin: 4px 4px 4px 0; }
`);

// Returns the rows that can run and have no time yet.
const unmeasured = (rows) => rows.filter(({ seconds, possible }) => seconds === null && possible);

// Sorts the rows: first the one that ran, then the others by time, then those without a time, last those that cannot run.
function ordered(rows) {
  const place = ({ chosen, possible, seconds }) => (chosen ? 0 : !possible ? 3 : seconds === null ? 2 : 1);
  return [...rows].sort((a, b) => place(a) - place(b) || (place(a) === 1 ? a.seconds - b.seconds : 0));
}

function cell(row, text, detail) {
  const td = row.insertCell();
  td.append(text);
  if (detail) td.append(document.createElement("br"), element("small", "", detail));
  return td;
}

// Draws the table. Calls `apply(row)` if a row is clicked, and `measure(rows)` to measure the rows without a time.
// `progress`: text in place of the measure button during a measurement.
export function drawCandidates(into, rows, { apply, measure, progress = "" } = {}) {
  into.replaceChildren();
  if (!rows.length) {
    into.append(element("p", "", translate(EMPTY)));
    return;
  }
  const table = document.createElement("table");
  table.createCaption().textContent = translate("A step of the latest run, by strategy");
  const slowest = Math.max(...rows.map((r) => r.seconds ?? 0));
  for (const r of ordered(rows)) {
    const tr = table.insertRow();
    tr.className = r.chosen ? "chosen" : r.possible ? "" : "impossible";
    if (r.chosen) tr.setAttribute("aria-current", "true");
    const strategy = translate(r.strategy);
    const name = element("button", "", (r.chosen ? "→ " : "") + strategy);
    name.type = "button";
    cell(tr, name, [r.result, r.compared, r.by_links].filter(Boolean).map(translate).join(" · "));
    if (r.possible || r.chosen) {
      tr.title = say("apply_row", { strategy });
      tr.addEventListener("click", () => apply?.(r)); // the button's click comes here too
    } else name.disabled = true;
    const time = cell(tr, r.step, translate(r.how));
    if (r.seconds !== null) {
      const meter = document.createElement("meter");
      Object.assign(meter, { min: 0, max: slowest || 1, value: r.seconds, title: translate(`${r.step} per step`) });
      time.prepend(meter);
    }
    cell(tr, translate(r.memory));
  }
  into.append(table);
  const rest = unmeasured(rows);
  if (progress) into.append(element("p", "", progress));
  else if (rest.length && measure) {
    const made = button(say("measure_rest", { count: rest.length }), () => measure(rest));
    made.title = say("measure_hint");
    into.append(made);
  }
}
