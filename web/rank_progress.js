// Shows a slim bar for each rank while a node with a report panel runs, above the report in that panel.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyle, element } from "./lib/dom.js";
import { nodeOf } from "./lib/graph.js";
import { leftOf, MANY } from "./lib/progress.js";
import { translate } from "./lib/said.js";

const PANEL = "report_panel";
const STYLE = `
.parallel-bars:not([hidden]) { flex: 0 0 auto; max-height: 100%; overflow: hidden; display: grid; gap: 2px 6px; margin: 0 0 4px; padding: 0;
  grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); list-style: none; font-size: 10px; line-height: 14px; }
.parallel-bars li { position: relative; height: 14px; padding: 0 4px; border-radius: 3px; overflow: hidden; white-space: nowrap;
  text-overflow: ellipsis; background: var(--comfy-input-bg); color: var(--input-text); }
.parallel-bars li i { position: absolute; inset: 0 auto 0 0; opacity: 0.45; background: var(--p-primary-color, #31b9f4); }
.parallel-bars li span { position: relative; }
.parallel-left:not([hidden]) { flex: 0 0 auto; margin: 0 0 4px; }
.parallel-bars.many { grid-template-columns: repeat(auto-fill, minmax(60px, 1fr)); gap: 2px; font-size: 9px; }
.parallel-bars.many li { padding: 0 2px; }
`;

function barsOf(node) {
  const panel = node?.widgets?.find((widget) => widget.name === PANEL)?.element;
  if (!panel) return null;
  const found = panel.querySelector(".parallel-bars");
  if (found) return found;
  const made = element("ul", "parallel-bars");
  made.setAttribute("aria-label", translate("Progress of each process"));
  const left = element("p", "parallel-left");
  left.hidden = true;
  panel.prepend(made, left);
  return made;
}

function draw(bars, ranks) {
  while (bars.children.length > ranks.length) bars.lastChild.remove();
  while (bars.children.length < ranks.length) {
    const bar = element("li", "", element("i"), element("span"));
    bar.setAttribute("role", "progressbar");
    bars.append(bar);
  }
  const many = ranks.length > MANY;
  bars.classList.toggle("many", many);
  ranks.forEach(({ device, words, progress, left }, at) => {
    const bar = bars.children[at];
    const percent = Math.round(100 * (progress ?? 0));
    const short = `${device} ${translate(words)}`;
    bar.firstChild.style.width = `${percent}%`;
    bar.title = [short, translate(left)].filter(Boolean).join(" · ");
    bar.lastChild.textContent = many && progress !== null ? `${device} ${percent} %` : short;
    bar.setAttribute("aria-label", bar.title);
    if (progress === null) bar.removeAttribute("aria-valuenow");
    else bar.setAttribute("aria-valuenow", String(percent));
  });
  bars.hidden = !ranks.length;
  const left = bars.nextElementSibling;
  left.textContent = leftOf(ranks);
  left.hidden = !left.textContent;
}

app.registerExtension({
  name: "parallel_sampling.rank_progress",
  setup() {
    addStyle(STYLE);
    api.addEventListener("parallel_sampling.progress", ({ detail }) => {
      const bars = barsOf(nodeOf(detail.node));
      if (bars) draw(bars, detail.ranks);
    });
  },
});
