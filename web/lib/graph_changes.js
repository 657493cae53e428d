// Changes a graph and keeps its links and values: moves the links of a node to another one, or replaces the node.
import { app } from "../../../scripts/app.js";
import { captureState, rootGraph } from "./graph.js";

export const OUTSIDE = -20; // what a link of a subgraph ends at that leaves it
const FROM_OUTSIDE = -10; // what one begins at that comes from without
export const ACTIVE = 0; // neither muted nor bypassed
export const GAP = 40; // pixels

export const graphs = () => [rootGraph(), ...(rootGraph()?.subgraphs?.values() ?? [])].filter(Boolean);
export const activeOf = (graph, kind) => graph.nodes.filter((node) => node.comfyClass === kind && node.mode === ACTIVE);
const titleHeight = () => globalThis.LiteGraph.NODE_TITLE_HEIGHT;
export const linkOf = (graph, id) => (id == null ? null : (graph.links.get?.(id) ?? graph.links[id]));
export const slotOf = (slots, name) => slots?.findIndex((slot) => slot.name === name) ?? -1;
export const slotOfType = (node, type) => node?.outputs?.findIndex((output) => output.type === type) ?? -1;
export const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name);

// Returns true if the node class `kind` offers, in its input `name`, the file that input `own` of `node` names.
export function offersFile(kind, name, node, own) {
  const { required } = globalThis.LiteGraph.registered_node_types[kind].nodeData.input;
  const [options, more] = required[name];
  return (Array.isArray(options) ? options : more.options).includes(widgetOf(node, own)?.value);
}

export function linksOf(graph, node, slot) {
  return (node.outputs[slot]?.links ?? []).map((id) => linkOf(graph, id)).filter(Boolean);
}

// Connects the target of a link to output `slot` of `origin` instead.
export function move(graph, link, origin, slot) {
  if (Number(link.target_id) === OUTSIDE) graph.outputs[link.target_slot].connect(origin.outputs[slot], origin);
  else origin.connect(slot, graph.getNodeById(link.target_id), link.target_slot, link.parentId);
}

// Returns the first free position at or below the given one for a node of this size. `title`: the height of its title.
function freePlace(graph, [x, top], [width, height], title) {
  let y = top + title;
  for (let tries = 0; tries < 100; tries++) {
    const over = graph.nodes.find(
      (node) =>
        node.pos[0] < x + width + GAP / 2 &&
        node.pos[0] + node.size[0] + GAP / 2 > x &&
        node.pos[1] - title < y + height &&
        node.pos[1] + node.size[1] > y - title,
    );
    if (!over) break;
    y = over.pos[1] + over.size[1] + GAP / 2 + title;
  }
  return [x, y];
}

// Moves a new node to the first free position at or below the given one, which is that of its title.
export function place(graph, node, at) {
  node.pos = [-1e6, -1e6]; // not in its own way
  node.pos = freePlace(graph, at, node.size, titleHeight());
}

// Runs `act` as one step of undo and returns its result.
export function change(act) {
  const canvas = app.canvas;
  canvas.emitBeforeChange?.();
  try {
    return act();
  } finally {
    canvas.emitAfterChange?.();
    canvas.setDirty(true, true);
    captureState();
  }
}

// Connects the origin of a link to input `name` of `node` as well.
export function bring(graph, { origin_id: origin, origin_slot: slot, parentId }, node, name) {
  const into = slotOf(node.inputs, name);
  if (into < 0) return;
  if (Number(origin) === FROM_OUTSIDE) graph.inputs[slot].connect(node.inputs[into], node);
  else graph.getNodeById(origin).connect(slot, node, into, parentId);
}

// Replaces a node with one of class `kind` under the same id, so that a subgraph still shows its widgets. `names`: {old: new}
// for inputs that have another name there; `types`: the types of the outputs whose links are kept.
export function exchange(graph, old, kind, names, types) {
  const incoming = old.inputs
    .map(({ name, link }) => [name, linkOf(graph, link)])
    .filter(([, link]) => link)
    .map(([name, { origin_id, origin_slot, parentId }]) => [name, { origin_id, origin_slot, parentId }]);
  const outgoing = types.flatMap((type) =>
    linksOf(graph, old, slotOfType(old, type)).map(({ target_id, target_slot, parentId }) => [type, { target_id, target_slot, parentId }]),
  );
  const node = globalThis.LiteGraph.createNode(kind);
  graph.remove(old);
  node.id = old.id;
  graph.add(node);
  for (const widget of old.widgets ?? []) {
    const own = widgetOf(node, names[widget.name] ?? widget.name);
    if (own && widget.serialize !== false) own.value = widget.value;
  }
  if (old.title !== old.constructor.title) node.title = old.title;
  Object.assign(node, { color: old.color, bgcolor: old.bgcolor });
  node.setSize([Math.max(old.size[0], node.size[0]), node.size[1]]);
  place(graph, node, [old.pos[0], old.pos[1] - titleHeight()]);
  for (const [name, link] of incoming) bring(graph, link, node, names[name] ?? name);
  for (const [type, link] of outgoing) move(graph, link, node, slotOfType(node, type));
  return node;
}
