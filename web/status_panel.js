// Shows the ranks in ComfyUI's sidebar: what each group and device does and holds, live over ComfyUI's websocket, with
// buttons. A visible panel tells the server every few seconds to go on; a hidden or closed one tells it once to stop.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button } from "./lib/button.js";
import { memoryOf } from "./lib/devices.js";
import { addStyle, element } from "./lib/dom.js";
import { groupCard } from "./lib/rank_cards.js";
import { translate } from "./lib/said.js";
import { say } from "./lib/words.js";

const NAME = "parallel_sampling.status_panel";
const TAB = "parallel-sampling";
const EVENT = "parallel_sampling.status";
const WATCH = "/parallel_sampling/watch";
const RANKS = "/parallel_sampling/ranks";
const SAY_AGAIN = 5000; // ms; the server's lease is three times as long
const PATIENCE = 8000; // ms for an answer
const SILENT = "ComfyUI does not answer. What stands here is the last that it said; it goes on by itself.";
const NO_GROUPS = "No processes yet: they start with the first prompt.";
const STYLE = `
.parallel-status { height: 100%; overflow-y: auto; overflow-x: hidden; box-sizing: border-box; padding: 8px; min-width: 0;
  font: 12px sans-serif; color: var(--input-text);
  max-width: calc(100vw - var(--sidebar-width, 4rem) - 4px); } /* in a narrow window the sidebar itself sticks out */
.parallel-status header { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between; gap: 6px;
  margin-bottom: 8px; }
.parallel-status header .buttons { display: flex; flex-wrap: wrap; gap: 6px; }
.parallel-status h2 { margin: 0; font-size: 14px; font-weight: 600; }
.parallel-status .silent .parallel-group { opacity: 0.75; }
.parallel-status .problem { color: var(--parallel-error); border-left: 3px solid var(--parallel-error); padding-left: 6px;
  margin: 0 0 8px; overflow-wrap: anywhere; white-space: pre-line; }
.parallel-status .machine, .parallel-status .others { color: var(--parallel-muted); margin: 0 0 8px; overflow-wrap: anywhere; }
.parallel-status .others ul { list-style: none; margin: 4px 0 0; padding: 0; }
.parallel-status .unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
`;

async function post(path, body) {
  const answer = await api.fetchApi(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    keepalive: true, // also from a page that is being closed
    signal: AbortSignal.timeout(path === WATCH ? PATIENCE : 600_000), // waking loads a model
  });
  const said = await answer.json().catch(() => ({ error: `ComfyUI answered with status ${answer.status}` }));
  return { ok: answer.ok, said };
}

class Panel {
  constructor(container) {
    this.cards = new Map(); // devices -> card
    this.states = new Map(); // devices -> state that was announced
    this.empty = element("p", "", translate("Asking ComfyUI …"));
    this.problem = element("p", "problem");
    this.problem.setAttribute("role", "alert");
    this.problem.hidden = true;
    this.silent = this.problem.cloneNode();
    this.leftOut = element("p", "problem left-out");
    this.leftOut.hidden = true;
    this.settings = element("p", "problem settings");
    this.settings.hidden = true;
    this.announced = element("div", "unseen");
    this.announced.setAttribute("role", "status"); // read aloud as it changes; the steps of a job are not
    this.groups = element("div", "groups");
    this.machine = element("p", "machine");
    this.others = element("div", "others");
    const doctor = button(translate("Run the doctor"), () => app.extensionManager.command.execute("parallel_sampling.doctor"));
    doctor.title = translate("Examine the installation, the devices and the links between them; takes about half a minute");
    const gpu = button(translate("Run the GPU check"), () => app.extensionManager.command.execute("parallel_sampling.gpu_check"));
    gpu.title = translate("Try kernels, memory, every way to split and faults, and write a report; takes minutes");
    const title = element("h2", "", translate("Parallel Sampling"));
    this.root = element("div", "parallel-status", element("header", "", title, element("div", "buttons", doctor, gpu)));
    this.root.append(this.silent, this.problem, this.leftOut, this.settings, this.machine, this.empty, this.groups);
    this.root.append(this.others, this.announced);
    this.root.setAttribute("role", "region");
    this.root.setAttribute("aria-label", translate("Status of Parallel Sampling"));
    container.replaceChildren(this.root);

    this.ending = new AbortController();
    const on = (target, event, handler) => target.addEventListener(event, handler, { signal: this.ending.signal });
    on(api, EVENT, ({ detail }) => this.show(detail));
    on(api, "reconnecting", () => this.isSilent(true));
    on(api, "reconnected", () => this.look(true));
    on(document, "visibilitychange", () => this.follow());
    this.follow();
  }

  // Watches while the page is visible, and stops when it is hidden.
  follow() {
    clearInterval(this.timer);
    if (document.visibilityState === "visible") {
      this.timer = setInterval(() => this.look(false), SAY_AGAIN);
      this.look(true);
    } else {
      this.lookAway();
    }
  }

  async look(anew) {
    const client = api.clientId;
    try {
      const { ok } = await post(WATCH, { client_id: String(client), looking: true, anew: anew || this.client !== client });
      this.client = ok ? client : null; // without a websocket there was nothing to send to: anew the next time
      this.isSilent(!ok && !anew);
    } catch {
      this.client = null;
      this.isSilent(true);
    }
  }

  lookAway() {
    clearInterval(this.timer);
    if (this.client) post(WATCH, { client_id: String(this.client), looking: false, anew: false }).catch(() => {});
    this.client = null;
  }

  close() {
    this.ending.abort();
    this.lookAway();
  }

  isSilent(silent) {
    if (this.ending.signal.aborted) return;
    this.silent.hidden = !silent;
    this.silent.textContent = silent ? translate(SILENT) : "";
    this.groups.classList.toggle("silent", silent);
  }

  show({ groups, left_out: leftOut, settings, machine = "", others = [] }) {
    this.isSilent(false);
    const keys = groups.map((group) => group.devices.join(" "));
    for (const [key, card] of this.cards) {
      if (keys.includes(key)) continue;
      card.root.remove();
      this.cards.delete(key);
      this.states.delete(key);
    }
    groups.forEach((group, at) => {
      const key = keys[at];
      if (!this.cards.has(key)) {
        const card = groupCard((action, devices) => this.ask(action, devices));
        this.cards.set(key, card);
        this.groups.append(card.root);
      }
      this.cards.get(key).update(group);
      if (this.states.get(key) !== group.state) {
        const words = `${translate(group.words)}. ${translate(group.reason)}`;
        if (this.states.has(key)) this.announced.textContent = `${group.devices.join(", ")}: ${words}`;
        this.states.set(key, group.state);
      }
    });
    const started = groups.some((group) => group.state !== "down");
    this.empty.hidden = started;
    this.empty.textContent = translate(NO_GROUPS);
    this.showLeftOut(leftOut);
    this.settings.textContent = translate(settings.join("\n"));
    this.settings.hidden = !settings.length;
    this.machine.textContent = translate(machine);
    this.showOthers(others);
  }

  // Lists the devices without ranks.
  showOthers(devices) {
    const lines = devices.map((one) => {
      const told = [one.name, memoryOf(one), ...one.users.map(translate)].filter(Boolean);
      return element("li", "", element("b", "", one.device), ` ${told.join(" · ")}`);
    });
    this.others.hidden = !lines.length;
    this.others.replaceChildren(say("other_devices"), element("ul", "", ...lines));
  }

  showLeftOut(devices) {
    const text = devices.length && translate(`${devices.join(", ")} left out by auto: processes there failed more than once lately. `);
    if (this.leftOut.dataset.text === String(text)) return;
    this.leftOut.dataset.text = text;
    this.leftOut.hidden = !text;
    this.leftOut.replaceChildren(text || "", text ? button(translate("Take back"), () => this.ask("reset", [])) : "");
  }

  async ask(action, devices) {
    this.problem.hidden = true;
    let text = "";
    try {
      text = (await post(`${RANKS}/${action}`, { devices })).said.error ?? "";
    } catch (error) {
      text = `ComfyUI did not answer: ${error.message}`;
    }
    this.problem.textContent = translate(text);
    this.problem.hidden = !text;
  }
}

function open() {
  const tabs = app.extensionManager.sidebarTab;
  if (tabs?.activeSidebarTabId !== TAB) app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`);
}

app.registerExtension({
  name: NAME,
  commands: [{ id: NAME, label: "Show the status of Parallel Sampling", icon: "pi pi-server", function: open }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [NAME] }],

  setup() {
    addStyle(STYLE);
    let panel = null;
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-server",
      title: "Parallel",
      tooltip: "Parallel Sampling: devices and processes",
      type: "custom",
      render(container) {
        if (panel?.root.parentElement === container) return; // asked to draw again what stands there
        panel?.close();
        panel = new Panel(container);
      },
      destroy() {
        panel?.close();
        panel = null;
      },
    });
  },
});
