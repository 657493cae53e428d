// Adds the pack's entries to ComfyUI's Settings. ComfyUI saves them in its settings file; the server reads and checks them
// there (nodes/host/settings.py).
import { app } from "../../scripts/app.js";

const GROUP = "Parallel Sampling";

function setting(name, section, label, type, defaultValue, tooltip, attrs) {
  return {
    id: `parallel_sampling.${name}`,
    category: [GROUP, section, label],
    name: label,
    type,
    defaultValue,
    tooltip,
    ...(attrs ? { attrs } : {}),
  };
}

const PRICE = { min: 0, max: 1000000, step: 0.01 };
const MINUTES = { min: 0, max: 10080, step: 1 };

app.registerExtension({
  name: "parallel_sampling.settings",
  settings: [
    setting(
      "default_devices", "Devices", "Default devices", "text", "all",
      "Where no Strategy Selector is connected: all, GPU numbers such as 0,1,3, or cpu:2.",
    ),
    setting(
      "allow_approximate", "Devices", "Allow approximate strategies", "boolean", true,
      "Off: auto never chooses PipeFusion, and PipeFusion or a step cache set by hand is refused.",
    ),
    setting(
      "try_strategies", "Devices", "Try strategies in a first run", "boolean", true,
      "Some steps of a first run use other exact strategies, and auto keeps the fastest. Off: it gives the same bits as the next ones.",
    ),
    setting(
      "make_encoders_parallel", "Devices", "Make text encoders and VAEs parallel too", "boolean", false,
      "Make this workflow parallel then puts Parallel CLIP behind each loader of a text encoder, and the parallel nodes of VAEs in the place of ComfyUI's.",
    ),
    setting(
      "start_at_launch", "Processes", "Start the processes with ComfyUI", "boolean", false,
      "Starts processes on the default devices when ComfyUI starts. They load a model with the first prompt.",
    ),
    setting(
      "preload_next", "Processes", "Prepare the next prompt early", "boolean", true,
      "While a prompt decodes its image, the next waiting one's model is loaded, if it fits beside those that are held, and idle devices encode its texts. On GPUs, processes start when a prompt names its model.",
    ),
    setting(
      "sleep_after_minutes", "Processes", "Minutes until idle processes sleep (0: never)", "number", 0,
      "Gives the devices' memory back; the next prompt loads the weights again.", MINUTES,
    ),
    setting(
      "stop_after_minutes", "Processes", "Minutes until idle processes end (0: never)", "number", 0,
      "Ends the processes; the next prompt starts them again.", MINUTES,
    ),
    setting(
      "metrics", "Metrics", "Metrics for Prometheus", "boolean", false,
      "Counts jobs, steps and failures, and serves them at /parallel_sampling/metrics.",
    ),
    setting(
      "price_per_gpu_hour", "Metrics", "Price of a GPU-hour (0: none)", "number", 0,
      "In your currency. Reports, the log and the metrics then tell what images cost.", PRICE,
    ),
  ],
});
