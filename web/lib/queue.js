// Tells listeners of each prompt that this page queues, once ComfyUI has accepted or refused it.
import { api } from "../../../scripts/api.js";

const listeners = []; // (nodes of the prompt by execution id, ComfyUI's answer)

export function watchQueue(listener) {
  listeners.push(listener);
}

const queuePrompt = api.queuePrompt;
api.queuePrompt = function (number, prompt, ...rest) {
  const tell = (answer) => {
    for (const listener of listeners) listener(prompt?.output ?? {}, answer ?? {});
  };
  return queuePrompt.call(this, number, prompt, ...rest).then(
    (answer) => {
      tell(answer);
      return answer;
    },
    (error) => {
      tell(error?.response);
      throw error;
    },
  );
};
