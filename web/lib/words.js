// Gives the words of the pack's panels and menus in ComfyUI's language, from locales/<language>/main.json. Words that a
// language lacks are in English.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const GROUP = "parallel_sampling";
const ENGLISH = "en";

const served = await api
  .fetchApi("/i18n")
  .then((answer) => answer.json())
  .catch((error) => console.warn("parallel sampling: no words in any language", error));

// Returns the words `name`. Each {key} in them is replaced by `values[key]`.
export function say(name, values = {}) {
  const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? ENGLISH;
  const words = served?.[language]?.[GROUP]?.[name] ?? served?.[ENGLISH]?.[GROUP]?.[name] ?? name;
  return words.replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);
}
