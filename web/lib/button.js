// Makes the buttons of the pack's panels and dialogs, so that they look the same.
import { addStyle, element } from "./dom.js";
import { translate } from "./said.js";

addStyle(`
.parallel-button { color: var(--input-text); background: var(--comfy-input-bg); border: 1px solid var(--border-color);
  border-radius: 4px; padding: 3px 10px; font: inherit; cursor: pointer; }
.parallel-button:hover { border-color: var(--parallel-muted); }
.parallel-button:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); outline-offset: 1px; }
.parallel-button[aria-disabled="true"] { opacity: 0.7; cursor: default; }
`);

export function button(text, onClick) {
  const made = element("button", "parallel-button", text);
  made.type = "button";
  made.addEventListener("click", () => made.getAttribute("aria-disabled") === "true" || onClick(made));
  return made;
}

// Disables a button and gives the reason in its title, or enables it if `whyNot` is "". It keeps the focus either way.
export function explain(made, whyNot, title) {
  made.setAttribute("aria-disabled", String(Boolean(whyNot)));
  made.title = whyNot ? translate(`Not now: ${whyNot}`) : title;
}
