// Opens dialogs with a text that can be copied, and buttons below it.
import { button } from "./button.js";
import { addStyle, element } from "./dom.js";
import { translate } from "./said.js";

addStyle(`
dialog.parallel-doctor { color: var(--input-text); background: var(--comfy-menu-bg); width: min(95vw, 900px); max-height: 90vh;
  box-sizing: border-box; border: 1px solid var(--border-color); border-radius: 8px; overflow: hidden; }
dialog.parallel-doctor[open] { display: flex; flex-direction: column; gap: 6px; }
dialog.parallel-doctor h2 { margin: 0; font-size: 16px; flex: 0 0 auto; }
dialog.parallel-doctor::backdrop { background: rgb(0 0 0 / 50%); }
dialog.parallel-doctor pre { overflow: auto; flex: 0 1 auto; min-height: 0; font-size: 12px; margin: 0; white-space: pre-wrap; }
dialog.parallel-doctor .buttons { display: flex; gap: 8px; flex: 0 0 auto; }
`);

// Shows a dialog and returns {dialog, text, buttons, closed}. `words`: its first text. A long text scrolls; title and buttons
// stay. `closed`: the AbortSignal of its end.
export function openDialog(label, words) {
  const dialog = element("dialog", "parallel-doctor");
  dialog.setAttribute("aria-label", label);
  const text = element("pre", "", words);
  const copy = button(translate("Copy"), () => {
    getSelection().selectAllChildren(text);
    document.execCommand("copy"); // navigator.clipboard is missing where the page comes over plain HTTP
  });
  const buttons = element("div", "buttons", button(translate("Close"), () => dialog.close()), copy);
  dialog.append(element("h2", "", label), text, buttons);
  const ending = new AbortController();
  dialog.addEventListener("close", () => {
    dialog.remove();
    ending.abort();
  });
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // else ComfyUI takes Escape for one of its shortcuts
    if (event.key === "Escape") dialog.close();
  });
  dialog.addEventListener("copy", (event) => event.stopPropagation()); // else ComfyUI copies the selected nodes
  document.body.append(dialog);
  dialog.showModal();
  return { dialog, text, buttons, closed: ending.signal };
}
