// Marks widgets with wrong values and disables widgets without effect, in both ways in which ComfyUI draws a node.
import { app } from "../../../scripts/app.js";

const MARK = "⚠ ";
const COLORS = ["outline_color", "text_color", "secondary_text_color"]; // of the canvas
const labels = new WeakMap(); // marked widget -> its label without the mark

// True if ComfyUI draws nodes as Vue elements, not on its canvas.
export const byVue = () => Boolean(app.extensionManager?.setting.get("Comfy.VueNodes.Enabled"));

function errorColor() {
  return getComputedStyle(document.documentElement).getPropertyValue("--error-text").trim() || "red";
}

export function markWidget(widget, wrong) {
  if (wrong === labels.has(widget)) return;
  if (wrong) {
    labels.set(widget, widget.label);
    widget.label = MARK + (widget.label ?? widget.name);
    for (const color of COLORS) Object.defineProperty(widget, color, { configurable: true, get: errorColor });
    widget.getOutlineColor = errorColor;
  } else {
    widget.label = labels.get(widget);
    labels.delete(widget);
    for (const own of [...COLORS, "getOutlineColor"]) delete widget[own];
  }
}

// Returns the widget's label without the mark, or its name if it has no label.
export function plainLabel(widget) {
  return (labels.has(widget) ? labels.get(widget) : widget?.label) ?? widget?.name;
}

export function disableWidget(widget, off) {
  if (widget.type === "toggle") widget.options.read_only = off; // as nodes drawn by Vue know a toggle to be off
  widget.disabled = off;
}

// Colours the marked labels of a node that Vue draws; call it after Vue has drawn. `inside`: an element on the node.
export function markRows(inside) {
  for (const row of inside.closest("[data-node-id]")?.querySelectorAll(".lg-node-widget") ?? []) {
    const label = row.querySelector("[data-testid='widget-layout-field-label']");
    const wrong = label?.textContent.trim().startsWith(MARK) ?? false;
    if (label) label.style.color = wrong ? "var(--parallel-error)" : "";
    row.querySelector("input")?.setAttribute("aria-invalid", wrong);
  }
}
