// Shows the devices to choose from, with name, memory and users. A choice is written into the text of the devices input;
// only this text counts.
import { api } from "../../../scripts/api.js";
import { addStyle, element } from "./dom.js";
import { translate } from "./said.js";
import { say } from "./words.js";

const ROUTE = "/parallel_sampling/devices";
const LOOK_AGAIN = 2000; // ms, while it is open
const ALL = "all";
const CPU = "cpu:";

addStyle(`
.parallel-devices { margin: 4px; }
.parallel-devices summary { cursor: pointer; }
.parallel-devices summary:focus-visible { outline: 2px solid var(--p-primary-color, var(--input-text)); }
.parallel-devices fieldset { border: 0; margin: 0; padding: 2px 0 0; min-width: 0; }
.parallel-devices label { display: flex; gap: 6px; align-items: baseline; padding: 2px 0; border-top: 1px solid var(--border-color); }
.parallel-devices label > span { flex: 1 1 0; min-width: 0; overflow-wrap: anywhere; }
.parallel-devices small { display: block; color: var(--parallel-muted); }
.parallel-devices .busy small.users { color: var(--parallel-error); }
.parallel-devices small:empty { display: none; }
`);

const inGib = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0)} GiB`;

export function memoryOf({ total_bytes: total, free_bytes: free }) {
  if (!total) return "";
  return free ? translate(`free ${inGib(free)} of ${inGib(total)}`) : inGib(total);
}

// Returns the text that selects `chosen` out of `all`. A single CPU rank becomes cpu:1, since cpu:3 means three ranks.
function textFor(chosen, all) {
  if (!chosen[0].startsWith(CPU)) return chosen.length === all.length ? ALL : chosen.map((name) => name.split(":")[1]).join(",");
  const first = chosen.every((name, at) => name === CPU + at);
  return first || chosen.length === 1 ? CPU + chosen.length : chosen.join(",");
}

function row(choose) {
  const box = document.createElement("input");
  box.type = "checkbox";
  const [name, memory, users] = ["", "memory", "users"].map((kind) => element("small", kind));
  const title = element("b");
  const root = element("label", "", box, element("span", "", title, name, memory, users));
  box.addEventListener("change", () => choose(box));
  return { box, title, name, memory, users, root };
}

// A list of checkboxes. `input`: {text(): the input's text, undefined if a node must run first; isLinked(): true if another
// node gives it; isThere(): true if the node is in the graph; write(text)}.
export class DevicePicker {
  constructor(input) {
    this.input = input;
    this.rows = new Map(); // what it writes -> its row
    this.machine = element("p");
    this.list = element("div");
    this.fields = element("fieldset", "", this.list, this.machine);
    this.fields.setAttribute("aria-label", say("choose_devices"));
    this.root = element("details", "parallel-devices", element("summary", "", say("choose_devices")), this.fields);
    this.root.addEventListener("toggle", () => this.follow());
    // Otherwise ComfyUI takes keys as shortcuts.
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
  }

  // Updates the list regularly while it is open and visible.
  async follow() {
    clearTimeout(this.timer);
    if (!this.root.open || !this.input.isThere()) return;
    if (this.root.checkVisibility()) await this.look();
    this.timer = setTimeout(() => this.follow(), LOOK_AGAIN);
  }

  async look() {
    const text = this.input.text();
    const asked = (this.asked = (this.asked ?? 0) + 1);
    try {
      const answer = await api.fetchApi(`${ROUTE}?text=${encodeURIComponent(text ?? ALL)}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const said = await answer.json();
      if (asked === this.asked) this.show(said, text);
    } catch (error) {
      this.machine.textContent = translate(`ComfyUI did not answer: ${error.message}`);
    }
  }

  show({ devices, clusters, selected, machine }, text) {
    const all = devices.map(({ device }) => device);
    const chosen = text === undefined ? [] : selected;
    this.fields.disabled = this.input.isLinked();
    this.machine.textContent = this.fields.disabled ? say("devices_linked") : translate(machine);
    const seen = new Set();
    for (const one of devices) {
      const { device, busy } = one;
      const made = this.rowOf(device, seen, (box) => this.choose(all, box));
      made.box.checked = chosen.includes(device);
      made.title.textContent = device;
      made.name.textContent = one.name;
      made.memory.textContent = memoryOf(one);
      made.users.textContent = one.users.map(translate).join("; ");
      made.root.classList.toggle("busy", busy);
    }
    for (const { devices: cluster, words, there } of clusters) {
      const made = this.rowOf(cluster, seen, (box) => this.input.write(box.checked ? cluster : ALL));
      made.box.checked = text?.trim().toLowerCase() === cluster;
      made.box.disabled = !there;
      made.title.textContent = cluster;
      made.users.textContent = translate(words);
    }
    for (const [key, { root }] of this.rows) {
      if (seen.has(key)) continue;
      root.remove();
      this.rows.delete(key);
    }
  }

  // Returns the row for `key`. Reuses an existing one, so that it keeps the focus.
  rowOf(key, seen, choose) {
    seen.add(key);
    let made = this.rows.get(key);
    if (!made) {
      made = row((box) => made.choose(box));
      this.rows.set(key, made);
      this.list.append(made.root);
    }
    made.choose = async (box) => {
      choose(box);
      await this.look();
    };
    return made;
  }

  // Writes the checked devices. The last one stays checked, since an empty text would mean all devices.
  choose(all, box) {
    const chosen = all.filter((name) => this.rows.get(name).box.checked);
    if (chosen.length) this.input.write(textFor(chosen, all));
    else box.checked = true;
  }
}
