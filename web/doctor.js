// "Run the doctor" in ComfyUI's menu and command list: what it says, in a dialog that can be copied from.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { openDialog } from "./lib/dialog.js";
import { translate } from "./lib/said.js";

const COMMAND = "parallel_sampling.doctor";
const WAIT = "Examining the installation and the devices; this takes about half a minute …";

async function examine() {
  const { text } = openDialog(translate("Doctor of Parallel Sampling"), translate(WAIT));
  try {
    const answer = await api.fetchApi("/parallel_sampling/doctor", { method: "POST" });
    const said = await answer.json();
    text.textContent = said.text ?? said.error;
  } catch (error) {
    text.textContent = translate(`ComfyUI did not answer: ${error}`);
  }
}

app.registerExtension({
  name: COMMAND,
  commands: [{ id: COMMAND, label: "Run the doctor of Parallel Sampling", icon: "pi pi-heart", function: examine }],
  menuCommands: [{ path: ["Extensions", "Parallel Sampling"], commands: [COMMAND] }],
});
