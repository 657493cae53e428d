// Tells of ranks that started, started again after a failure or failed too often, and of devices that are left out.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "parallel_sampling.toasts",
  setup() {
    api.addEventListener("parallel_sampling.toast", ({ detail: { severity, summary, detail, life } }) => {
      app.extensionManager.toast.add({ severity, summary, detail, ...(life === null ? {} : { life }) });
    });
  },
});
