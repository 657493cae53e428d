// Shows the report of a node's latest run in a dialog, for nodes without a report panel.
import { openDialog } from "./dialog.js";
import { element } from "./dom.js";
import { drawPhases, drawTimeline } from "./timeline.js";
import { say } from "./words.js";
import { translate } from "./said.js";

// Opens the dialog. `output`: the value that run_ui in nodes/runs/run_ui.py returns.
export function openReport(node, output) {
  const { text } = openDialog(`${say("open_report")}: ${node.title}`, translate(output.text.join("\n\n")));
  text.before(element("h3", "parallel-headline", translate(output.parallel_headline?.[0] ?? "")));
  const phases = output.parallel_phases?.[0];
  if (phases?.phases.length) text.before(drawPhases(phases));
  const timeline = output.parallel_timeline?.[0] && drawTimeline(output.parallel_timeline[0]);
  if (!timeline) return;
  timeline.open = true;
  text.before(timeline);
}
