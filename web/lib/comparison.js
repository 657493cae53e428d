// Two pictures of one job under a slider, with their difference and both times.
import { api } from "../../../scripts/api.js";
import { addStyle, element } from "./dom.js";
import { say } from "./words.js";
import { translate } from "./said.js";

addStyle(`
.parallel-comparison { margin: 0; display: flex; flex-direction: column; gap: 4px; min-height: 0; min-width: 0; }
.parallel-comparison .pictures { position: relative; display: grid; flex: 1 1 auto; min-height: 0; overflow: hidden; }
.parallel-comparison img { grid-area: 1 / 1; width: 100%; height: 100%; object-fit: contain; min-height: 0; display: block;
  user-select: none; }
.parallel-comparison img + img { clip-path: inset(0 0 0 var(--at)); }
.parallel-comparison input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0; cursor: ew-resize; }
.parallel-comparison .line { position: absolute; top: 0; bottom: 0; left: var(--at); width: 2px; margin-left: -1px;
  background: var(--p-primary-color, #31b9f4); pointer-events: none; }
.parallel-comparison input:focus-visible + .line { width: 6px; margin-left: -3px; }
.parallel-comparison .titles { display: flex; justify-content: space-between; gap: 8px; }
.parallel-comparison .titles span:last-child { text-align: right; }
.parallel-comparison figcaption { overflow-wrap: anywhere; }
`);

const HALF = 50; // percent

function picture(saved) {
  const image = element("img");
  image.src = api.apiURL(`/view?${new URLSearchParams(saved)}`);
  image.draggable = false;
  image.alt = "";
  return image;
}

const inSeconds = (seconds) => `${seconds.toPrecision(3)} s`;

// `told`: {titles, seconds, pictures: one device's and all devices', speed_up, levels, exact}, as the backend has it.
export function drawComparison({ titles, seconds, pictures, speed_up: times, levels, exact }) {
  const box = element("div", "pictures", ...pictures.map(picture));
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 100, value: HALF });
  slider.setAttribute("aria-label", say("slider", { one: translate(titles[0]), all: translate(titles[1]) }));
  const move = () => box.style.setProperty("--at", `${slider.value}%`);
  slider.addEventListener("input", move);
  for (const event of ["keydown", "pointerdown"]) slider.addEventListener(event, (e) => e.key === "Escape" || e.stopPropagation());
  move();
  box.append(slider, element("div", "line"));
  const names = titles.map((title, at) => element("span", "", `${translate(title)}: ${inSeconds(seconds[at])}`));
  const facts = [
    say("speed_up", { times: times.toPrecision(2) }),
    say("largest_difference", { levels }),
    say(exact ? "exact" : "approximate"),
  ];
  const words = element("figcaption", "", facts.join(" · "));
  if (times < 1) words.append(element("div", "", say("one_is_faster")));
  return element("figure", "parallel-comparison", element("div", "titles", ...names), box, words);
}
