// Adds "Run the doctor" to ComfyUI's menu and commands: a dialog shows its progress, then its report as text to copy.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { openDialog } from "./lib/dialog.js";
import { messages } from "./lib/messages.js";
import { translate } from "./lib/said.js";

const COMMAND = "parallel_sampling.doctor";
const WAIT = "Examining the installation and the devices; this takes about half a minute …";
const INDENT = "    ";

// Returns a report of commands/doctor/report.py as text: verdicts by group, each with its table rows and its remedy.
function inWords({ verdicts, summary }) {
  const lines = [];
  let last = null;
  for (const { group, name, status, finding, remedy, details } of verdicts) {
    if (group !== last) lines.push("", translate(group));
    last = group;
    lines.push(`  ${translate(status)} · ${translate(name)}: ${translate(finding)}`, ...details.map((row) => INDENT + row));
    if (remedy) lines.push(`${INDENT}→ ${translate(remedy)}`);
  }
  return [...lines, "", translate(summary)].join("\n").trim();
}

async function examine() {
  const { text, closed } = openDialog(translate("Doctor of Parallel Sampling"), translate(WAIT));
  try {
    const answer = await api.fetchApi("/parallel_sampling/doctor", { method: "POST", signal: closed });
    if (!answer.ok) {
      text.textContent = translate((await answer.json()).error);
      return;
    }
    for await (const { line, report, error } of messages(answer.body)) {
      if (line) text.textContent += `\n${translate(line)} …`;
      else text.textContent = report ? inWords(report) : translate(error);
    }
  } catch (error) {
    if (!closed.aborted) text.textContent = translate(`ComfyUI did not answer: ${error}`);
  }
}

app.registerExtension({
  name: COMMAND,
  commands: [{ id: COMMAND, label: "Run the doctor of Parallel Sampling", icon: "pi pi-heart", function: examine }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [COMMAND] }],
});
