// The words of the pack's own panels and menus in ComfyUI's language: locales/<language>/main.json has them, English where
// a language lacks one.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const GROUP = "parallel_sampling";
const ENGLISH = "en";

const served = await api
  .fetchApi("/i18n")
  .then((answer) => answer.json())
  .catch((error) => console.warn("parallel sampling: no words in any language", error));

// `name`: of the words; {…} in them are replaced by the values of these names.
export function say(name, values = {}) {
  const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? ENGLISH;
  const words = served?.[language]?.[GROUP]?.[name] ?? served?.[ENGLISH]?.[GROUP]?.[name] ?? name;
  return words.replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);
}
