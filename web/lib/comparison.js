// Draws two pictures of one job under a slider, or their difference, with a bar for the time of each.
import { api } from "../../../scripts/api.js";
import { button } from "./button.js";
import { addStyle, element } from "./dom.js";
import { say } from "./words.js";
import { translate } from "./said.js";

addStyle(`
.parallel-comparison { margin: 0; display: flex; flex-direction: column; gap: 4px; min-height: 0; min-width: 0; }
.parallel-comparison .pictures { position: relative; display: grid; flex: 1 1 auto; min-height: 0; overflow: hidden; }
.parallel-comparison .both { display: grid; min-height: 0; isolation: isolate; }
.parallel-comparison img { grid-area: 1 / 1; width: 100%; height: 100%; object-fit: contain; min-height: 0; display: block;
  user-select: none; }
.parallel-comparison img + img { clip-path: inset(0 0 0 var(--at)); }
.parallel-comparison .difference .both { filter: brightness(10); }
.parallel-comparison .difference img + img { clip-path: none; mix-blend-mode: difference; }
.parallel-comparison .difference input, .parallel-comparison .difference .line { display: none; }
.parallel-comparison input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0; cursor: ew-resize; }
.parallel-comparison .line { position: absolute; top: 0; bottom: 0; left: var(--at); width: 2px; margin-left: -1px;
  background: var(--p-primary-color, #31b9f4); pointer-events: none; }
.parallel-comparison input:focus-visible + .line { width: 6px; margin-left: -3px; }
.parallel-comparison .titles { display: flex; justify-content: space-between; align-items: center; gap: 8px; }
.parallel-comparison .titles span:last-child { text-align: right; }
.parallel-comparison .times { display: grid; grid-template-columns: auto 1fr auto; gap: 2px 8px; align-items: center; }
.parallel-comparison .times i { height: 8px; border-radius: 2px; background: var(--p-primary-color, #31b9f4); }
.parallel-comparison figcaption { overflow-wrap: anywhere; }
.parallel-comparison figcaption strong { display: block; }
`);

const HALF = 50; // percent

function picture(saved) {
  const image = element("img");
  image.src = api.apiURL(`/view?${new URLSearchParams(saved)}`);
  image.draggable = false;
  image.alt = "";
  return image;
}

// Returns a bar for the step time of each side; the longest one takes the full width.
function timesOf(titles, seconds) {
  const longest = Math.max(...seconds);
  const per = translate("per step");
  const cells = titles.flatMap((title, at) => {
    const bar = element("i");
    bar.style.width = `${(100 * seconds[at]) / longest}%`;
    return [element("span", "", translate(title)), bar, element("span", "", `${seconds[at]} s ${per}`)];
  });
  return element("div", "times", ...cells);
}

function verdict(levels, exact) {
  if (levels === 0) return say("same_picture");
  if (exact && levels === 1) return say("same_but_rounding");
  return say("differs", { levels });
}

// Returns the figure. The lists `titles`, `seconds` (per step) and `pictures` have one device first, then all devices.
// nodes/compare.py sends these values.
export function drawComparison({ titles, seconds, pictures, compared, levels, exact }) {
  const images = pictures.map(picture);
  const box = element("div", "pictures", element("div", "both", ...images));
  images[0].addEventListener("load", () => {
    box.style.aspectRatio = `${images[0].naturalWidth} / ${images[0].naturalHeight}`;
  });
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 100, value: HALF });
  slider.setAttribute("aria-label", say("slider", { one: translate(titles[0]), all: translate(titles[1]) }));
  const move = () => box.style.setProperty("--at", `${slider.value}%`);
  slider.addEventListener("input", move);
  for (const event of ["keydown", "pointerdown"]) slider.addEventListener(event, (e) => e.key === "Escape" || e.stopPropagation());
  move();
  box.append(slider, element("div", "line"));
  const view = button(say("show_difference"), () => {
    const isDifference = box.classList.toggle("difference");
    view.textContent = say(isDifference ? "show_pictures" : "show_difference");
    view.setAttribute("aria-pressed", String(isDifference));
  });
  view.setAttribute("aria-pressed", "false");
  const facts = [translate(compared), say(exact ? "exact" : "approximate")].join(" · ");
  const words = element("figcaption", "", element("strong", "", verdict(levels, exact)), facts);
  const names = titles.map((title) => element("span", "", translate(title)));
  const head = element("div", "titles", names[0], view, names[1]);
  return element("figure", "parallel-comparison", head, box, timesOf(titles, seconds), words);
}
