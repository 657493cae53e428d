// Shows a toast when ranks start, start again after a failure or fail too often, and when devices are left out.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyle } from "./lib/dom.js";
import { translate } from "./lib/said.js";
import { tell } from "./lib/tell.js";

// Moves the toast beside ComfyUI's error card: both appear in the same corner, and the card is as wide as `right`. In the page
// of frontend 1.58 all toasts move.
const STYLE = `
body:has([data-testid="error-overlay"]) .parallel-toast { position: relative; right: 496px; }
body:has([data-testid="error-overlay"]) [data-testid="toast-viewport"] { translate: -496px; }
`;

const shown = new Map(); // what a toast is about -> takes it away; what came before about the same is over

app.registerExtension({
  name: "parallel_sampling.toasts",
  setup() {
    addStyle(STYLE);
    api.addEventListener("parallel_sampling.toast", ({ detail: { severity, summary, detail, life, about } }) => {
      shown.get(about)?.();
      const remove = tell(severity, translate(detail), { summary: translate(summary), life, styleClass: "parallel-toast" });
      if (about) shown.set(about, remove);
    });
  },
});
