// "Run the doctor" in ComfyUI's menu and command list: what it says, in a dialog that can be copied from.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const COMMAND = "parallel_sampling.doctor";
const STYLE = `
dialog.parallel-doctor { color: var(--input-text); background: var(--comfy-menu-bg); max-width: 95vw; max-height: 90vh;
  border: 1px solid var(--border-color); border-radius: 8px; }
dialog.parallel-doctor::backdrop { background: rgb(0 0 0 / 50%); }
dialog.parallel-doctor pre { overflow: auto; max-height: 70vh; font-size: 12px; margin: 8px 0; }
dialog.parallel-doctor button { color: var(--input-text); background: var(--comfy-input-bg); padding: 4px 12px;
  border: 1px solid var(--border-color); border-radius: 4px; margin-right: 8px; cursor: pointer; }
`;

function button(text, onClick) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", onClick);
  return made;
}

function open() {
  const dialog = document.createElement("dialog");
  dialog.className = "parallel-doctor";
  dialog.setAttribute("aria-label", "Doctor of Parallel Sampling");
  const text = document.createElement("pre");
  text.textContent = "Examining the installation and the devices; this takes about half a minute …";
  const copy = button("Copy", () => navigator.clipboard?.writeText(text.textContent));
  dialog.append(text, button("Close", () => dialog.close()), copy);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // else ComfyUI takes Escape for one of its shortcuts
    if (event.key === "Escape") dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return text;
}

async function examine() {
  const text = open();
  try {
    const answer = await api.fetchApi("/parallel_sampling/doctor", { method: "POST" });
    const said = await answer.json();
    text.textContent = said.text ?? said.error;
  } catch (error) {
    text.textContent = `ComfyUI did not answer: ${error}`;
  }
}

app.registerExtension({
  name: COMMAND,
  commands: [{ id: COMMAND, label: "Run the doctor of Parallel Sampling", icon: "pi pi-heart", function: examine }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [COMMAND] }],
  setup() {
    document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
  },
});
