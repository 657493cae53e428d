// Adds commands, and items in the menus of the canvas and of nodes, that make a workflow parallel: Parallel Model behind its
// loaders (parallel text encoders and VAEs too if the settings say so), or the pack's loader and sampler; and the way back.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { offerEncoders } from "./lib/offer.js";
import { canMakeParallel, canTakeOut, givesStockModel, makeParallel, takeOut } from "./lib/parallel_graph.js";
import { canSwapIn, canSwapOut, swapIn, swapOut } from "./lib/swap_nodes.js";
import { tell } from "./lib/tell.js";
import { say } from "./lib/words.js";

const PARALLEL = ["ParallelModel", "ParallelCLIP"];
const MAKE = "parallel_sampling.make_parallel";
const BACK = "parallel_sampling.make_stock";
const SWAP = "parallel_sampling.swap_in";
const SWAP_BACK = "parallel_sampling.swap_out";
const SWAPPED = ["KSampler", "UNETLoader"]; // in whose menus, and in those of what takes their places
const OURS = ["ParallelSampler", "ParallelModelLoader"];

// Makes the workflow parallel. The message stays until a person closes it or undoes the change.
async function make() {
  if (!(await offerEncoders())) return;
  const { count, inside, areThere } = makeParallel();
  if (!count) return tell("info", say("nothing_to_make"));
  const where = inside.length ? say("inside", { names: inside.join(", ") }) : "";
  const detail = say(count === 1 ? "made_one_parallel" : "made_parallel", { count, where });
  const remove = tell("success", detail, { life: null });
  const look = () => {
    if (areThere()) return;
    remove();
    api.removeEventListener("graphChanged", look);
  };
  api.addEventListener("graphChanged", look);
}

function back() {
  const { out, stay } = takeOut();
  const words = [out || !stay ? say(out ? "made_stock" : "nothing_to_take", { count: out }) : "", stay ? say("stays", { count: stay }) : ""];
  tell(out ? "success" : "info", words.filter(Boolean).join(" "));
}

function swap() {
  const count = swapIn();
  tell(count ? "success" : "info", count ? say("swapped", { count }) : say("nothing_to_swap"));
}

function swapBack() {
  const count = swapOut();
  tell(count ? "success" : "info", count ? say("swapped_back", { count }) : say("nothing_to_swap_back"));
}

const makeItem = () => ({ content: say("make_parallel"), callback: make });
const backItem = () => ({ content: say("make_stock"), callback: back });
const swapItem = () => ({ content: say("swap"), callback: swap });
const swapBackItem = () => ({ content: say("swap_back"), callback: swapBack });

app.registerExtension({
  name: "parallel_sampling.make_parallel",
  commands: [
    { id: MAKE, label: "Make this workflow parallel", icon: "pi pi-clone", function: make },
    { id: BACK, label: "Take Parallel Model out of this workflow", icon: "pi pi-undo", function: back },
    { id: SWAP, label: "Swap KSampler and its loader for the parallel ones", icon: "pi pi-arrow-right-arrow-left", function: swap },
    { id: SWAP_BACK, label: "Swap back to KSampler and its loader", icon: "pi pi-undo", function: swapBack },
  ],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [MAKE, BACK, SWAP, SWAP_BACK] }],

  getCanvasMenuItems() {
    const items = [
      ...(canMakeParallel() ? [makeItem()] : []),
      ...(canSwapIn() ? [swapItem()] : []),
      ...(canTakeOut() ? [backItem()] : []),
      ...(canSwapOut() ? [swapBackItem()] : []),
    ];
    return items.length ? [null, ...items] : [];
  },

  getNodeMenuItems(node) {
    const kind = node.comfyClass;
    return [
      ...(givesStockModel(node) ? [makeItem()] : []),
      ...(SWAPPED.includes(kind) && canSwapIn() ? [swapItem()] : []),
      ...(PARALLEL.includes(kind) && canTakeOut() ? [backItem()] : []),
      ...(OURS.includes(kind) && canSwapOut() ? [swapBackItem()] : []),
    ];
  },
});
