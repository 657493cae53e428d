// Adds "Run the GPU check": a dialog shows its progress, then its report to copy or save. Closing the dialog ends it.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button } from "./lib/button.js";
import { openDialog } from "./lib/dialog.js";
import { messages } from "./lib/messages.js";
import { translate } from "./lib/said.js";

const COMMAND = "parallel_sampling.gpu_check";
const BEFORE = `Tries everything that a GPU is for, with the demo model: kernels, memory, every way to split a picture, faults.

It takes some minutes, and longer on GPUs, where it compiles. It ends the processes that are warm, kills processes of its own on purpose,
and for a moment takes all memory of the first GPU: save your work, run no prompt meanwhile, and unload ComfyUI's models.
Closing this dialog ends it.
`;

function save(name, text) {
  const link = Object.assign(document.createElement("a"), {
    href: URL.createObjectURL(new Blob([text], { type: "application/octet-stream" })),
    download: name,
  });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function run(text, buttons, signal) {
  const answer = await api.fetchApi("/parallel_sampling/gpu_check", { method: "POST", signal });
  if (!answer.ok) {
    text.textContent = translate((await answer.json()).error);
    return;
  }
  text.textContent = "";
  for await (const { line, error, markdown, report, result } of messages(answer.body)) {
    if (markdown === undefined) {
      text.textContent += `${line ?? translate(error)}\n`;
      text.scrollTop = text.scrollHeight;
      continue;
    }
    text.textContent = markdown;
    text.scrollTop = 0;
    buttons.append(button(translate("Save Markdown"), () => save("gpu-check.md", markdown)));
    buttons.append(button(translate("Save JSON"), () => save("gpu-check.json", JSON.stringify(report, null, 1))));
    if (result) {
      buttons.append(button(translate("Save a result to share"), () => save("result.json", result)));
    }
  }
}

function open() {
  const { text, buttons, closed } = openDialog(translate("GPU check of Parallel Sampling"), translate(BEFORE));
  const start = button(translate("Run"), async () => {
    start.remove();
    buttons.querySelector("button").focus(); // else Escape would go to the page below
    text.textContent = translate("Starting …");
    try {
      await run(text, buttons, closed);
    } catch (error) {
      text.textContent += translate(`\nComfyUI did not answer: ${error}`);
    }
  });
  buttons.prepend(start);
  start.focus();
}

app.registerExtension({
  name: COMMAND,
  commands: [{ id: COMMAND, label: "Run the GPU check of Parallel Sampling", icon: "pi pi-bolt", function: open }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [COMMAND] }],
});
