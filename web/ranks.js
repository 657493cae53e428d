// The ranks in ComfyUI's menu: what each group does and holds, and buttons to put them to sleep, stop or reset them.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const COMMAND = "parallel_sampling.ranks";
const ROUTE = "/parallel_sampling/ranks";
const LOOK_AGAIN = 1000; // ms, while the dialog is open and its tab is seen
const BUTTONS = [
  ["sleep", "Sleep", "Give the devices' memory back; the next prompt loads the weights again"],
  ["stop", "Stop", "End all idle ranks; the next prompt starts them again"],
  ["reset", "Try again", "Let ranks start again that failed too often"],
];
const STYLE = `
dialog.parallel-ranks { color: var(--input-text); background: var(--comfy-menu-bg); max-width: 95vw; min-width: 280px;
  border: 1px solid var(--border-color); border-radius: 8px; font: 13px sans-serif; }
dialog.parallel-ranks::backdrop { background: rgb(0 0 0 / 50%); }
dialog.parallel-ranks table { border-collapse: collapse; width: 100%; margin: 8px 0; }
dialog.parallel-ranks th, dialog.parallel-ranks td { text-align: left; padding: 4px 10px 4px 0; overflow-wrap: anywhere;
  border-top: 1px solid var(--border-color); }
dialog.parallel-ranks button { color: var(--input-text); background: var(--comfy-input-bg); padding: 4px 12px;
  border: 1px solid var(--border-color); border-radius: 4px; margin: 0 8px 4px 0; cursor: pointer; }
dialog.parallel-ranks output { color: var(--error-text); display: block; min-height: 1.2em; }
`;

function draw(table, groups) {
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  for (const title of ["Devices", "State", "Holds"]) head.append(Object.assign(document.createElement("th"), { textContent: title }));
  for (const group of groups) {
    const row = table.insertRow();
    for (const text of [group.devices.join(", "), group.state, group.model ?? "–"]) row.insertCell().textContent = text;
  }
  if (!groups.length) table.insertRow().insertCell().textContent = "No ranks yet: they start with the first prompt.";
}

async function ask(table, problem, path, options) {
  try {
    const said = await (await api.fetchApi(path, options)).json();
    problem.textContent = said.error ?? "";
    if (said.groups) draw(table, said.groups);
  } catch (error) {
    problem.textContent = `ComfyUI did not answer: ${error}`;
  }
}

function show() {
  const dialog = document.createElement("dialog");
  dialog.className = "parallel-ranks";
  dialog.setAttribute("aria-label", "Ranks of Parallel Sampling");
  const table = document.createElement("table");
  const problem = document.createElement("output");
  dialog.append(table, problem);
  const add = (text, title, onClick) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
    made.addEventListener("click", onClick);
    dialog.append(made);
  };
  for (const [action, text, title] of BUTTONS) {
    add(text, title, () => ask(table, problem, `${ROUTE}/${action}`, { method: "POST" }));
  }
  add("Close", "", () => dialog.close());
  const look = () => document.visibilityState === "visible" && ask(table, problem, ROUTE);
  const timer = setInterval(look, LOOK_AGAIN);
  dialog.addEventListener("close", () => {
    clearInterval(timer);
    dialog.remove();
  });
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // else ComfyUI takes Escape for one of its shortcuts
    if (event.key === "Escape") dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  look();
}

app.registerExtension({
  name: COMMAND,
  commands: [{ id: COMMAND, label: "Show the ranks of Parallel Sampling", icon: "pi pi-server", function: show }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [COMMAND] }],
  setup() {
    document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
  },
});
