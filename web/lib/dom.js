// Makes the elements, styles and panels that the pack's files share.

const MARGIN = 10; // pixels that ComfyUI leaves around a panel

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Makes an element of a drawing. `words`, if given, are shown when the mouse is on it.
export function inSvg(tag, attributes, words = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (words) made.append(Object.assign(inSvg("title", {}), { textContent: words }));
  return made;
}

export function addStyle(text) {
  document.head.append(Object.assign(document.createElement("style"), { textContent: text }));
}

// Mixes ComfyUI's muted and error colours with its text colour, so that they are readable in the light and dark themes.
addStyle(`:root {
  --parallel-muted: color-mix(in srgb, var(--descrip-text) 40%, var(--input-text));
  --parallel-error: color-mix(in srgb, var(--error-text) 45%, var(--input-text));
}`);

// Lets a region scroll by wheel and keyboard. The wheel zooms the canvas only with Ctrl, or if the region cannot scroll.
export function makeScrollable(region, label) {
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", label);
  region.addEventListener("wheel", (event) => {
    if (region.scrollHeight > region.clientHeight && !event.ctrlKey) event.stopPropagation();
  });
  region.addEventListener("keydown", (event) => {
    if (/^(Arrow|Page|Home|End)/.test(event.key)) event.stopPropagation();
  });
  return region;
}

// Puts `root` under the node's widgets as a panel. It takes no place in the list of saved values: a later version could
// read it as the value of a new input. Its content never makes the node larger: it scrolls, and grows with the node.
export function addPanel(node, name, root, minHeight) {
  Object.assign(root.style, { contain: "size", minHeight: `${minHeight - 2 * MARGIN}px` });
  const widget = node.addDOMWidget(name, name, root, {
    serialize: false,
    hideOnZoom: false,
    hideInPanel: true, // ComfyUI's list of a node's parameters would take it from the node, and show it empty
    getMinHeight: () => minHeight,
  });
  widget.serialize = false;
  return widget;
}
