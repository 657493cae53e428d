// Draws which device does what as nested boxes: one level for each axis that is split, with the devices in the innermost.
import { addStyle, element } from "./dom.js";
import { translate } from "./said.js";

const EXTRA = "share"; // said in a device's own box, never a level
addStyle(`
.parallel-diagram figure { margin: 0 0 6px; }
.parallel-diagram figcaption { margin: 2px; color: var(--parallel-muted); }
.parallel-diagram ul { display: flex; flex-wrap: wrap; gap: 4px; list-style: none; margin: 0; padding: 0; }
.parallel-diagram li { border: 1px solid var(--border-color); border-radius: 4px; padding: 3px 5px; min-width: 0;
  box-sizing: border-box; max-width: 100%; overflow-wrap: anywhere; }
.parallel-diagram li.group { flex: 1 1 auto; }
.parallel-diagram li.group > span { display: block; margin-bottom: 2px; color: var(--parallel-muted); }
.parallel-diagram li.device { flex: 1 1 64px; background: var(--comfy-input-bg); color: var(--input-text); }
.parallel-diagram li.device b { display: block; }
.parallel-diagram li.idle { opacity: 0.8; border-style: dashed; }
`);

function device(seat, axis) {
  const own = seat.roles.filter((role) => role.axis === axis || role.axis === EXTRA || seat.rank === null);
  const box = element("li", seat.rank === null ? "device idle" : "device", element("b", "", seat.device));
  box.append(own.map((role) => translate(role.text)).join(", "));
  box.title = translate(seat.text);
  return box;
}

function level(seats, axes) {
  const list = document.createElement("ul");
  if (axes.length < 2) {
    list.append(...seats.map((seat) => device(seat, axes[0])));
    return list;
  }
  const groups = new Map();
  for (const seat of seats) {
    const text = seat.roles.find((role) => role.axis === axes[0]).text;
    groups.set(text, [...(groups.get(text) ?? []), seat]);
  }
  for (const [text, members] of groups) {
    list.append(element("li", "group", element("span", "", translate(text)), level(members, axes.slice(1))));
  }
  return list;
}

// Draws `cases`: [{title, seats: [{device, rank (null: idle), roles: [{axis, text}], text}]}], sent by the backend.
export function drawCases(into, cases) {
  into.replaceChildren(
    ...cases.map(({ title, seats }) => {
      const busy = seats.filter((seat) => seat.rank !== null);
      const axes = (busy[0]?.roles ?? []).map((role) => role.axis).filter((axis) => axis !== EXTRA);
      const drawn = level(busy, axes);
      drawn.append(...seats.filter((seat) => seat.rank === null).map((seat) => device(seat)));
      return element("figure", "", element("figcaption", "", translate(title)), drawn);
    }),
  );
}
