// The title that the model writes for a conversation. The first question is the title until the model has
// written one.

import { titleOf } from "./tree.js";

const MAX_TOKENS = 32;
const MAX_WORDS = 10;
const WISH =
  "Write a title for this conversation: two to six words in the language of the conversation. Answer with the title only.";

/** Return the fields of the request. The request repeats the conversation, whose keys and values the server has cached. */
export function titleRequest(answerRequest, answer) {
  const messages = [...answerRequest.messages, { role: "assistant", content: answer }, { role: "user", content: WISH }];
  const fields = { messages, stream: true, max_tokens: MAX_TOKENS, temperature: 0.3, reasoning_effort: "none" };
  return answerRequest.model ? { ...fields, model: answerRequest.model } : fields;
}

export function titleFrom(text) {
  const [line = ""] = text.trim().split("\n");
  const plain = line
    .replace(/^(?:#+\s*|\*+|title\s*:\s*|["'“”«»„`*\s]+)+/i, "")
    .replace(/["'“”«»„`*.\s]+$/, "");
  const isShort = plain.split(/\s+/).length <= MAX_WORDS;
  return isShort && plain ? titleOf(plain) : "";
}

export class Titles {
  /** `save(chat)` stores and shows a conversation. */
  constructor(api, save) {
    this.api = api;
    this.save = save;
    this.running = null; // {id, controller}
  }

  /** Cancel the request, because an answer needs the server. */
  cancel() {
    this.running?.controller.abort();
    this.running = null;
  }

  /** Ask for a title. Errors are ignored, because a conversation has a title without the model. */
  async ask(chat, answerRequest, answer) {
    this.cancel();
    const before = chat.title;
    const run = (this.running = { id: chat.id, controller: new AbortController() });
    let text = "";
    let isComplete = false;
    try {
      for await (const { choices } of this.api.chat(titleRequest(answerRequest, answer), run.controller.signal)) {
        text += choices?.[0]?.delta?.content ?? "";
        isComplete ||= choices?.[0]?.finish_reason === "stop"; // "length" means that the text is not a title
      }
    } catch {
      isComplete = false;
    }
    const title = isComplete && this.running === run && chat.title === before ? titleFrom(text) : "";
    if (this.running === run) this.running = null;
    if (!title) return;
    chat.title = title;
    this.save(chat);
  }
}
