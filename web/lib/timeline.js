// Draws how the time of a run's steps was spent: a row per device, with a bar of computing, sending and waiting per step.
// Also draws what the whole prompt used the devices for: one row of texts, loading, sampling and pictures.
import { addStyle, element, inSvg } from "./dom.js";
import { translate } from "./said.js";
import { say } from "./words.js";

const PARTS = ["computing", "sending", "waiting"]; // as a step's numbers are, in observability/timeline.py
const COLOURS = { computing: "#4f8fd0", sending: "#d0a04f", waiting: "#8a8a8a" };
// Each phase's name for `say`, and its colour.
const PHASES = {
  text: ["phase_text", "#7a6fc9"],
  encode: ["phase_encode", "#b06fb5"],
  load: ["phase_load", "#8a8a8a"],
  sample: ["phase_sample", "#4f8fd0"],
  decode: ["phase_decode", "#5fa86a"],
};
const ROW = 18; // pixels
addStyle(`
.parallel-timeline, .parallel-phases { flex: 0 0 auto; padding: 2px 4px; }
.parallel-timeline summary { cursor: pointer; }
.parallel-timeline .row { display: flex; gap: 6px; align-items: center; }
.parallel-timeline .row > span { flex: 0 0 5em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.parallel-timeline svg, .parallel-phases svg { flex: 1 1 0; min-width: 0; width: 100%; height: ${ROW}px; }
.parallel-timeline .legend, .parallel-phases .legend { display: flex; flex-wrap: wrap; gap: 8px; }
.parallel-timeline .legend i, .parallel-phases .legend i { display: inline-block; width: 9px; height: 9px; margin-right: 3px; }
`);

// Returns the timeline of { ranks: [{ device, steps: [[seconds of each part], ...] }, ...] }, folded.
export function drawTimeline({ ranks }) {
  const longest = Math.max(...ranks.flatMap(({ steps }) => steps.map(total)));
  const legend = element("div", "legend", ...PARTS.map((part) => named(COLOURS[part], say(part))));
  const rows = ranks.map(({ device, steps }) => element("div", "row", element("span", "", device), bars(steps, longest)));
  return element("details", "parallel-timeline", element("summary", "", say("timeline")), ...rows, legend);
}

const total = (step) => step.reduce((sum, seconds) => sum + seconds, 0);

// Returns the row of { phases: [[name, seconds], ...], compared: a sentence, or "" }.
export function drawPhases({ phases, compared }) {
  const whole = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const svg = inSvg("svg", { viewBox: `0 0 ${whole} 1`, preserveAspectRatio: "none", role: "img" });
  const told = phases.map(([name, seconds]) => `${say(PHASES[name][0])} ${seconds.toFixed(2)} s (${((100 * seconds) / whole).toFixed(0)} %)`);
  svg.setAttribute("aria-label", `${say("phases")}: ${told.join(", ")}`);
  let left = 0;
  phases.forEach(([name, seconds], at) => {
    svg.append(inSvg("rect", { x: left, y: 0.05, width: seconds, height: 0.9, fill: PHASES[name][1] }, told[at]));
    left += seconds;
  });
  const legend = element("div", "legend", ...phases.map(([name], at) => named(PHASES[name][1], told[at])));
  const words = compared ? [element("div", "", translate(compared))] : [];
  return element("div", "parallel-phases", element("div", "", say("phases")), svg, legend, ...words);
}

function named(colour, words) {
  const mark = element("i", "");
  mark.style.background = colour;
  return element("span", "", mark, words);
}

function bars(steps, longest) {
  const svg = inSvg("svg", { viewBox: `0 0 ${steps.length} 1`, preserveAspectRatio: "none", role: "img" });
  steps.forEach((step, at) => {
    let top = 1;
    const told = PARTS.map((part, number) => `${say(part)} ${step[number].toFixed(4)} s`).join(", ");
    const bar = inSvg("g", {}, told);
    step.forEach((seconds, part) => {
      const height = longest ? seconds / longest : 0;
      top -= height;
      bar.append(inSvg("rect", { x: at + 0.05, y: top, width: 0.9, height, fill: COLOURS[PARTS[part]] }));
    });
    svg.append(bar);
  });
  return svg;
}
