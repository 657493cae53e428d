// "Make this workflow parallel", and back again: in the menus of the canvas and of nodes, and as commands.
import { app } from "../../scripts/app.js";
import { canMakeParallel, canTakeOut, givesStockModel, makeParallel, takeOut } from "./lib/parallel_graph.js";
import { say } from "./lib/words.js";

const PARALLEL = "ParallelModel";
const MAKE = "parallel_sampling.make_parallel";
const BACK = "parallel_sampling.make_stock";
const LIFE = 6000; // ms

function tell(severity, words) {
  app.extensionManager.toast.add({ severity, summary: "Parallel Sampling", detail: words, life: LIFE });
}

function make() {
  const count = makeParallel();
  tell(count ? "success" : "info", count ? say("made_parallel", { count }) : say("nothing_to_make"));
}

function back() {
  const { out, stay } = takeOut();
  const words = [out || !stay ? say(out ? "made_stock" : "nothing_to_take", { count: out }) : "", stay ? say("stays", { count: stay }) : ""];
  tell(out ? "success" : "info", words.filter(Boolean).join(" "));
}

const makeItem = () => ({ content: say("make_parallel"), callback: make });
const backItem = () => ({ content: say("make_stock"), callback: back });

app.registerExtension({
  name: "parallel_sampling.make_parallel",
  commands: [
    { id: MAKE, label: "Make this workflow parallel", icon: "pi pi-clone", function: make },
    { id: BACK, label: "Take Parallel Model out of this workflow", icon: "pi pi-undo", function: back },
  ],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [MAKE, BACK] }],

  getCanvasMenuItems() {
    const items = [...(canMakeParallel() ? [makeItem()] : []), ...(canTakeOut() ? [backItem()] : [])];
    return items.length ? [null, ...items] : [];
  },

  getNodeMenuItems(node) {
    if (givesStockModel(node)) return [makeItem()];
    return node.comfyClass === PARALLEL && canTakeOut() ? [backItem()] : [];
  },
});
