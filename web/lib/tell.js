// Shows a message of the pack in the corner of ComfyUI's page.
import { app } from "../../../scripts/app.js";
import { translate } from "./said.js";

// `severity`: success, info, warn or error. `life`: ms until it goes by itself.
export function tell(severity, detail, { summary = translate("Parallel Sampling"), life = 6000 } = {}) {
  app.extensionManager.toast.add({ severity, summary, detail, life });
}
