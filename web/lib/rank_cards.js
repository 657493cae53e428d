// Draws a group of ranks for the status panel: state, buttons, and the device, memory and progress of each rank.
// Elements are made once and then only changed, so that the focus stays where it is.
import { button, explain } from "./button.js";
import { addStyle, element, inSvg } from "./dom.js";
import { MANY } from "./progress.js";
import { translate } from "./said.js";

const ACTIONS = [
  ["sleep", "Sleep", "Give the devices' memory back; the processes stay, and the next prompt loads the weights again"],
  ["wake", "Wake", "Load the weights again now, not with the next prompt"],
  ["restart", "Restart", "End the processes and start new ones; the next prompt loads the weights"],
  ["stop", "Stop", "End the processes; the next prompt starts them again"],
  ["reset", "Allow restarts", "Let processes start again that failed too often, and take back devices that were left out"],
];
const NOT_STARTED = ["down", "failed"]; // states in which Restart starts
const PARTS = ["weights", "working", "others", "free"];

addStyle(`
.parallel-group { border: 1px solid var(--border-color); border-radius: 6px; padding: 8px; margin: 0 0 8px; min-width: 0; }
.parallel-group h3 { margin: 0 0 4px; font-size: 13px; font-weight: 600; overflow-wrap: anywhere; }
.parallel-group p { margin: 0 0 6px; overflow-wrap: anywhere; }
.parallel-group .reason { color: var(--parallel-error); }
.parallel-group .muted, .parallel-rank .muted { color: var(--parallel-muted); }
.parallel-group .actions { display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: 6px; }
.parallel-group ul { list-style: none; margin: 0; padding: 0; }
.parallel-rank { border-top: 1px solid var(--border-color); padding: 6px 0 2px; overflow-wrap: anywhere; }
.parallel-rank .line { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 8px; }
.parallel-rank progress:not([hidden]) { width: 100%; height: 5px; display: block; margin: 3px 0; accent-color: var(--p-primary-color); }
.parallel-group.many .parallel-rank { display: grid; grid-template-columns: 1fr auto; gap: 0 8px; padding: 3px 0 1px; }
.parallel-group.many .parallel-rank > .name, .parallel-group.many .parallel-rank > .sent { display: none; }
.parallel-group.many .parallel-rank > .line, .parallel-group.many .parallel-rank > progress { grid-column: 1 / -1; }
.parallel-group.many .parallel-key { font-size: 11px; flex-wrap: nowrap; }
.parallel-group.many .parallel-key > :not(:last-child) { display: none; }
.parallel-group.many .parallel-rank > .gauges { font-size: 11px; grid-column: 1 / -1; }
.parallel-memory { display: flex; height: 8px; border-radius: 4px; overflow: hidden; margin: 3px 0;
  background: var(--comfy-input-bg); border: 1px solid var(--border-color); }
.parallel-memory i, .parallel-key i { background: var(--part); }
.parallel-key { display: flex; flex-wrap: wrap; gap: 0 10px; color: var(--parallel-muted); }
.parallel-key i { display: inline-block; width: 8px; height: 8px; border-radius: 2px; margin-right: 4px;
  border: 1px solid var(--border-color); box-sizing: border-box; }
.parallel-part-weights { --part: var(--p-primary-color, #31b9f4); }
.parallel-part-working { --part: #e0a030; }
.parallel-part-others { --part: var(--descrip-text); }
.parallel-part-free { --part: var(--comfy-input-bg); }
.parallel-steps:not([hidden]) { display: flex; align-items: center; gap: 8px; }
.parallel-steps svg { flex: 1 1 60px; min-width: 40px; height: 24px; color: var(--p-primary-color, var(--input-text)); }
`);

function inBytes(bytes) {
  if (!bytes) return "0";
  const gib = bytes / 2 ** 30;
  if (gib >= 1) return `${gib.toFixed(gib < 10 ? 2 : 1)} GiB`;
  return `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB`;
}

function inSeconds(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

function show(made, text) {
  if (made.textContent !== text) made.textContent = text;
  made.hidden = text === "";
}

function gaugeWords(gauge) {
  if (!gauge) return "";
  const words = [];
  if (gauge.utilisation !== null) words.push(translate(`${Math.round(gauge.utilisation * 100)} % busy`));
  if (gauge.temperature !== null) words.push(`${gauge.temperature} °C`);
  if (gauge.power !== null) {
    const [power, limit] = [gauge.power, gauge.power_limit].map(Math.round);
    words.push(gauge.power_limit === null ? `${power} W` : translate(`${power} of ${limit} W`));
  }
  return words.join(" · ");
}

function memoryBar() {
  const bar = element("div", "parallel-memory");
  bar.setAttribute("role", "img");
  const key = element("div", "parallel-key");
  const parts = PARTS.map((part) => {
    const piece = element("i", `parallel-part-${part}`);
    const text = element("span");
    const entry = element("span", "", element("i", `parallel-part-${part}`), text);
    bar.append(piece);
    key.append(entry);
    return { piece, text, entry };
  });
  const update = (rank) => {
    const { gauge, weight_bytes: weights, working_bytes: working } = rank;
    const free = gauge?.free_bytes ?? 0;
    const total = free ? gauge.total_bytes : 0; // where nobody tells what is free, the rest is not other programs'
    const sizes = [weights, working, Math.max(0, total - free - weights - working), free];
    const whole = Math.max(1, total, weights + working);
    const words = sizes.map((size, at) =>
      translate(`${PARTS[at]} ${inBytes(size)}${at === 3 ? ` of ${inBytes(total)}` : ""}`),
    );
    parts.forEach(({ piece, text, entry }, at) => {
      piece.style.width = `${(100 * sizes[at]) / whole}%`;
      show(text, words[at]);
      entry.hidden = (at > 1 && !total) || (at === 2 && !sizes[at]);
    });
    bar.setAttribute("aria-label", translate(`Memory of ${rank.device}: ${words.join(", ")}`));
    if (gauge?.shared) bar.title = key.title = translate("The machine's memory, which all processes on the CPU share");
  };
  return { bar, key, update };
}

function rankRow() {
  const device = element("b");
  const words = element("span", "muted");
  const name = element("div", "muted name");
  const progress = document.createElement("progress");
  const gauges = element("div", "muted gauges");
  const sent = element("div", "muted sent");
  const memory = memoryBar();
  const root = element("li", "parallel-rank", element("div", "line", device, words), name, progress, memory.bar, memory.key);
  root.append(gauges, sent);
  const update = (rank) => {
    show(device, translate(`process ${rank.rank} · ${rank.device}`));
    show(words, [rank.words, rank.left].filter(Boolean).map(translate).join(" · "));
    show(name, rank.gauge?.name ?? "");
    root.title = name.textContent; // which is not drawn where there are many
    progress.hidden = rank.progress === null;
    if (rank.progress !== null) {
      progress.value = rank.progress;
      progress.setAttribute("aria-label", `${rank.device}: ${translate(rank.words)}`);
    }
    memory.update(rank);
    show(gauges, gaugeWords(rank.gauge));
    show(sent, rank.pid === null ? "" : translate(`${inBytes(rank.bytes_sent)} sent to other processes · PID ${rank.pid}`));
  };
  return { root, update };
}

// Draws the seconds of the latest steps as a line; the slowest step is at the top.
function sparkline() {
  const svg = inSvg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img" });
  const line = inSvg("polyline", {
    fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke",
  });
  svg.append(line);
  const text = element("span", "muted");
  const root = element("div", "parallel-steps", svg, text);
  const update = (seconds) => {
    root.hidden = seconds.length < 2;
    if (root.hidden) return;
    const most = Math.max(...seconds);
    const across = 100 / (seconds.length - 1);
    line.setAttribute("points", seconds.map((s, at) => `${(at * across).toFixed(1)},${(23 - (22 * s) / most).toFixed(1)}`).join(" "));
    const median = [...seconds].sort((a, b) => a - b)[seconds.length >> 1];
    show(text, translate(`${inSeconds(median)} per step`));
    const told = `Times of the latest ${seconds.length} steps, ${inSeconds(median)} in the middle, at most ${inSeconds(most)}`;
    svg.setAttribute("aria-label", translate(told));
  };
  return { root, update };
}

// Returns a group's card: {root, update(group)}. Calls `ask(action, devices)` when a button is pressed.
export function groupCard(ask) {
  const title = element("h3");
  const state = element("p", "state");
  const reason = element("p", "reason");
  const model = element("p", "muted");
  const actions = element("div", "actions");
  const steps = sparkline();
  const list = element("ul");
  const root = element("section", "parallel-group", title, state, reason, model, actions, steps.root, list);
  let devices = [];
  const buttons = ACTIONS.map(([name, text, hint]) => {
    const made = button(translate(text), () => ask(name, devices));
    actions.append(made);
    return { name, text, hint, made };
  });
  const rows = new Map();
  const update = (group) => {
    devices = group.devices;
    show(title, group.devices.join(", "));
    root.setAttribute("aria-label", translate(`Processes on ${group.devices.join(", ")}`));
    root.dataset.state = group.state;
    show(state, translate(group.words));
    show(reason, translate(group.reason));
    show(model, group.models.length ? translate(`holds ${group.models.join(", ")}`) : "");
    for (const { name, text, hint, made } of buttons) {
      const starts = name === "restart" && NOT_STARTED.includes(group.state);
      show(made, translate(starts ? "Start" : text));
      explain(made, group.why_not[name], translate(starts ? "Start the processes now, not with the next prompt" : hint));
    }
    steps.update(group.step_seconds);
    root.classList.toggle("many", group.ranks.length > MANY);
    for (const rank of group.ranks) {
      if (!rows.has(rank.device)) {
        rows.set(rank.device, rankRow());
        list.append(rows.get(rank.device).root);
      }
      rows.get(rank.device).update(rank);
    }
  };
  return { root, update };
}
