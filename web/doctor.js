// "Run the doctor" in ComfyUI's menu and command list: what it says, in a dialog that can be copied from.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button } from "./lib/button.js";
import { addStyle, element } from "./lib/dom.js";

const COMMAND = "parallel_sampling.doctor";
const STYLE = `
dialog.parallel-doctor { color: var(--input-text); background: var(--comfy-menu-bg); max-width: 95vw; max-height: 90vh;
  border: 1px solid var(--border-color); border-radius: 8px; }
dialog.parallel-doctor::backdrop { background: rgb(0 0 0 / 50%); }
dialog.parallel-doctor pre { overflow: auto; max-height: 70vh; font-size: 12px; margin: 8px 0; }
dialog.parallel-doctor .buttons { display: flex; gap: 8px; }
`;

function open() {
  const dialog = element("dialog", "parallel-doctor");
  dialog.setAttribute("aria-label", "Doctor of Parallel Sampling");
  const text = element("pre", "", "Examining the installation and the devices; this takes about half a minute …");
  const copy = button("Copy", () => navigator.clipboard?.writeText(text.textContent));
  dialog.append(text, element("div", "buttons", button("Close", () => dialog.close()), copy));
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
    addStyle(STYLE);
  },
});
