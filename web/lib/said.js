// Translates the pack's English sentences, including those of its server part, into ComfyUI's language. ../said.json has each
// sentence in each language, with {names} for the parts that vary and {n} for a number. Unknown sentences stay English.
import { app } from "../../../scripts/app.js";

const { languages, said } = await fetch(new URL("../said.json", import.meta.url))
  .then((answer) => answer.json())
  .catch((error) => {
    console.warn("no words in any language", error);
    return { languages: [], said: [] };
  });

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

function patternOf(sentence) {
  const parts = sentence.split(/\{(\w+)\}/); // texts, and names between them
  const gap = (name) => `(?<${name}>${name === "n" ? "[0-9.]+" : ".+?"})`;
  return new RegExp(`^${parts.map((part, at) => (at % 2 ? gap(part) : escaped(part))).join("")}$`);
}

const rules = said.map(([english, ...others]) => ({ pattern: patternOf(english), others }));

function lineIn(language, line) {
  for (const { pattern, others } of rules) {
    const found = pattern.exec(line);
    if (found) return others[language].replace(/\{(\w+)\}/g, (whole, name) => lineIn(language, found.groups[name]));
  }
  return line;
}

// Translates each line. The parts that vary in a sentence are translated as well if they are known sentences.
export function translate(words) {
  const language = languages.indexOf(app.extensionManager?.setting?.get("Comfy.Locale"));
  if (language < 0 || typeof words !== "string") return words;
  return words
    .split("\n")
    .map((line) => {
      const [, before, text, after] = /^(\s*)(.*?)(\s*)$/.exec(line);
      return before + (text && lineIn(language, text)) + after;
    })
    .join("\n");
}
