// Shows a message of the pack in the corner of ComfyUI's page.
import { app } from "../../../scripts/app.js";
import { translate } from "./said.js";

// Returns a function that takes the message away. `severity`: success, info, warn or error; `life`: ms until it goes by
// itself, null if it stays; `styleClass`: of its element, in older versions of ComfyUI's page.
export function tell(severity, detail, { summary = translate("Parallel Sampling"), life = 6000, styleClass = "" } = {}) {
  const { toast } = app.extensionManager;
  if (toast.dismiss) { // the page of frontend 1.58, where a message is known by a number
    const kind = severity === "warn" ? "warning" : severity;
    const id = toast[kind](summary, { description: detail, ...(life === null ? {} : { duration: life }) });
    return () => toast.dismiss(id);
  }
  const message = { severity, summary, detail, styleClass, ...(life === null ? {} : { life }) };
  toast.add(message);
  return () => toast.remove(message);
}
