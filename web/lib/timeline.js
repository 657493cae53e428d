// Where the time of a run's steps went: for each device a row, for each step a bar of computing, sending and waiting.
import { addStyle, element } from "./dom.js";
import { say } from "./words.js";

const PARTS = ["computing", "sending", "waiting"]; // as a step's numbers are, in observability/timeline.py
const COLOURS = { computing: "#4f8fd0", sending: "#d0a04f", waiting: "#8a8a8a" };
const ROW = 18; // pixels
addStyle(`
.parallel-timeline { flex: 0 0 auto; padding: 2px 4px; }
.parallel-timeline summary { cursor: pointer; }
.parallel-timeline .row { display: flex; gap: 6px; align-items: center; }
.parallel-timeline .row > span { flex: 0 0 5em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.parallel-timeline svg { flex: 1 1 0; min-width: 0; height: ${ROW}px; }
.parallel-timeline .legend { display: flex; flex-wrap: wrap; gap: 8px; }
.parallel-timeline .legend i { display: inline-block; width: 9px; height: 9px; margin-right: 3px; }
`);

const inSvg = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

// { ranks: [{ device, steps: [[seconds of each part], ...] }, ...] }
export function drawTimeline({ ranks }) {
  const longest = Math.max(...ranks.flatMap(({ steps }) => steps.map(total)));
  const legend = element("div", "legend", ...PARTS.map(named));
  const rows = ranks.map(({ device, steps }) => element("div", "row", element("span", "", device), bars(steps, longest)));
  return element("details", "parallel-timeline", element("summary", "", say("timeline")), ...rows, legend);
}

const total = (step) => step.reduce((sum, seconds) => sum + seconds, 0);

function named(part) {
  const colour = element("i", "");
  colour.style.background = COLOURS[part];
  return element("span", "", colour, say(part));
}

function bars(steps, longest) {
  const svg = inSvg("svg", { viewBox: `0 0 ${steps.length} 1`, preserveAspectRatio: "none", role: "img" });
  steps.forEach((step, at) => {
    let top = 1;
    const bar = inSvg("g", {});
    step.forEach((seconds, part) => {
      const height = longest ? seconds / longest : 0;
      top -= height;
      bar.append(inSvg("rect", { x: at + 0.05, y: top, width: 0.9, height, fill: COLOURS[PARTS[part]] }));
    });
    const told = PARTS.map((part, number) => `${say(part)} ${step[number].toFixed(4)} s`).join(", ");
    bar.append(inSvg("title", {}));
    bar.lastChild.textContent = told;
    svg.append(bar);
  });
  return svg;
}
