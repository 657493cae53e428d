// A dialog with a text that can be copied, and buttons below it.
import { button } from "./button.js";
import { addStyle, element } from "./dom.js";
import { translate } from "./said.js";

addStyle(`
dialog.parallel-doctor { color: var(--input-text); background: var(--comfy-menu-bg); max-width: 95vw; max-height: 90vh;
  border: 1px solid var(--border-color); border-radius: 8px; }
dialog.parallel-doctor::backdrop { background: rgb(0 0 0 / 50%); }
dialog.parallel-doctor pre { overflow: auto; max-height: 70vh; font-size: 12px; margin: 8px 0; white-space: pre-wrap; }
dialog.parallel-doctor .buttons { display: flex; gap: 8px; }
`);

// Shown at once: {dialog, text, buttons}. `words`: its first text.
export function openDialog(label, words) {
  const dialog = element("dialog", "parallel-doctor");
  dialog.setAttribute("aria-label", label);
  const text = element("pre", "", words);
  const copy = button(translate("Copy"), () => navigator.clipboard?.writeText(text.textContent));
  const buttons = element("div", "buttons", button(translate("Close"), () => dialog.close()), copy);
  dialog.append(text, buttons);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // else ComfyUI takes Escape for one of its shortcuts
    if (event.key === "Escape") dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return { dialog, text, buttons };
}
