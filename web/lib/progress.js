// Says how far the ranks of a running node are; several files draw it.
import { translate } from "./said.js";

export const MANY = 4; // more ranks than these are drawn or told in short

// Returns what the slowest rank does and its remaining time; "" if none runs, or if that is unknown.
export function leftOf(ranks) {
  if (!ranks.length) return "";
  const slowest = ranks.reduce((one, other) => ((other.progress ?? 0) < (one.progress ?? 0) ? other : one));
  return slowest.left ? [slowest.words, slowest.left].map(translate).join(" · ") : "";
}
