// Actions on a conversation: send, stop, regenerate, edit.

import { ApiError } from "./api.js";
import { announce } from "./dom.js";
import { dataUrl } from "./image_store.js";
import { Titles } from "./titles.js";
import { ROOT, add, openCalls, path, pathTo, place, remove, titleOf, turn } from "./tree.js";

const SAVE_MS = 2000; // during generation
const SHOW_MS = 50;
const SHOW_SHARE = 4; // Showing a long answer takes at most a quarter of the time.

export class Chat {
  /**
   * `show()` redraws the page, `tell(text)` shows an error, `settings()` returns request fields, `writesTitles()`
   * whether the model writes titles. `images` is an ImageStore.
   */
  constructor({ api, store, images, messages, settings, writesTitles, show, tell }) {
    Object.assign(this, { api, store, images, messages, settings, writesTitles, show, tell });
    this.titles = new Titles(api, (chat) => (this.keep(chat), this.show()));
    this.runs = new Map(); // conversation id -> {node, controller}
    this.current = null;
  }

  get running() {
    return new Set([...this.runs.values()].map((run) => run.node.id));
  }

  isRunning(chat = this.current) {
    return this.runs.has(chat.id);
  }

  save(chat) {
    try {
      this.store.save(chat);
    } catch (error) {
      this.tell(error.message);
    }
  }

  /** Save unless deleted. */
  keep(chat) {
    if (this.store.get(chat.id)) this.save(chat);
  }

  /** Send the text as a question, or as the result of the first tool call that has no result. `images` are ids. */
  send(text, images = []) {
    const chat = this.current;
    if (this.isRunning() || !(text.trim() || images.length)) return false;
    const shown = path(chat);
    const above = shown.at(-1)?.id ?? ROOT;
    const [call, ...others] = openCalls(shown);
    const more = images.length ? { images } : {};
    const node = call
      ? add(chat, above, "tool", text, { tool_call_id: call.id, name: call.name, ...more })
      : add(chat, above, "user", text, more);
    this.messages.follows = true;
    if (others.length) this.saved(chat);
    else this.answer(chat, node.id);
    return true;
  }

  edit(node, text) {
    if (this.isRunning()) return;
    const more = node.images ? { images: node.images } : {};
    this.answer(this.current, add(this.current, node.parent, "user", text, more).id);
  }

  again(node) {
    if (!this.isRunning()) this.answer(this.current, node.parent);
  }

  /** Show the version that is `step` positions away. */
  turn(node, step) {
    if (this.isRunning()) return;
    const shown = turn(this.current, node, step);
    this.messages.follows = false; // keep this message in view
    this.saved(this.current);
    this.messages.focus(shown);
    const [index, n] = place(this.current, shown);
    announce(`Version ${index + 1} of ${n}`);
  }

  remove(node) {
    if (this.isRunning()) return;
    remove(this.current, node);
    this.saved(this.current);
  }

  stop(chat = this.current) {
    this.runs.get(chat.id)?.controller.abort();
    if (this.titles.running?.id === chat.id) this.titles.cancel();
  }

  saved(chat) {
    this.save(chat);
    this.show();
  }

  /** Generate an answer below the message `above`. The conversation need not be open. */
  async answer(chat, above) {
    const node = add(chat, above, "assistant", "");
    const run = { node, controller: new AbortController(), began: 0, n: 0, read: null };
    this.titles.cancel();
    this.runs.set(chat.id, run);
    this.saved(chat);
    let saved = Date.now();
    let due = 0;
    let showMs = SHOW_MS;
    const draw = () => {
      due = 0;
      const began = performance.now();
      const isRunning = this.runs.get(chat.id) === run;
      if (chat === this.current) this.messages.update(node, isRunning, isRunning ? run.read : null);
      showMs = Math.max(SHOW_MS, SHOW_SHARE * (performance.now() - began));
      if (Date.now() - saved > SAVE_MS) (this.keep(chat), (saved = Date.now()));
    };
    let body = null;
    try {
      body = { ...(await requestOf(chat, above, this.images)), ...this.settings() };
      for await (const chunk of this.api.chat(body, run.controller.signal)) {
        this.take(run, chunk);
        due ||= setTimeout(draw, showMs);
      }
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") stopped(node);
      else node.error = reason(error);
    }
    clearTimeout(due);
    this.runs.delete(chat.id);
    draw();
    this.keep(chat);
    this.show();
    const isFirst = pathTo(chat, above).length === 1 && chat.title === titleOf(chat.nodes[above].content);
    const isComplete = node.content && !node.stopped && !node.error && !node.tool_calls;
    if (isFirst && isComplete && this.writesTitles()) this.titles.ask(chat, body, node.content);
  }

  take(run, chunk) {
    const { node } = run;
    const [choice] = chunk.choices ?? [];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      run.n++;
      run.began ||= performance.now();
      const took = (performance.now() - run.began) / 1000;
      node.stats = { ...node.stats, tokens: run.n, perSecond: took > 0.2 ? (run.n - 1) / took : 0 };
    }
    if (delta.content) node.content += delta.content;
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) addCall((node.tool_calls ??= []), call);
    if (chunk.prompt_progress) {
      const { total, processed } = chunk.prompt_progress;
      run.read = processed < total ? processed / total : null;
      node.stats = { ...node.stats, prompt: total };
    }
    if (chunk.timings) node.stats = { ...node.stats, ...statsOf(chunk.timings) };
    if (chunk.usage) {
      node.stats = { ...node.stats, prompt: chunk.usage.prompt_tokens, tokens: chunk.usage.completion_tokens };
    }
    if (choice?.finish_reason === "length") node.error = "The answer was cut off at the token limit.";
  }
}

/** Mark an answer that the user stopped. Calls may be incomplete, so they are removed. */
function stopped(node) {
  node.stopped = true;
  delete node.tool_calls;
  announce("Stopped.");
}

function addCall(calls, { index, id, function: part }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= id ?? "";
  call.name ||= part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

const IMAGE_PARTS = ["decode", "preprocess", "encode"];

const statsOf = (timings) => ({
  tokens: timings.predicted_n,
  perSecond: timings.predicted_per_second,
  prompt: timings.prompt_n + timings.cache_n,
  cached: timings.cache_n,
  drafted: timings.draft_n ?? 0,
  accepted: timings.draft_n_accepted ?? 0,
  promptMs: timings.prompt_ms,
  imageMs: timings.image_ms ?? 0,
  imageParts: IMAGE_PARTS.map((part) => [part, timings[`image_${part}_ms`] ?? 0]),
});

function reason(error) {
  if (!(error instanceof ApiError)) return `The page failed: ${error.message}`;
  if (error.status === 401) return "The server requires an API key. Press Regenerate to enter it.";
  return error.message;
}

/** Return request fields with the messages up to `last`. `images` is an ImageStore. */
export async function requestOf(chat, last, images) {
  const nodes = pathTo(chat, last);
  const contents = await Promise.all(nodes.map((node) => contentOf(node, images)));
  const messages = nodes.map((node, i) => {
    const { role } = node;
    const content = contents[i];
    if (role === "tool") return { role, content, tool_call_id: node.tool_call_id, name: node.name };
    if (role === "user") return { role, content };
    const message = { role, content };
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.tool_calls?.length) message.tool_calls = node.tool_calls.map(callOf);
    return message;
  });
  const said = [];
  for (const one of messages) {
    const before = said.at(-1);
    if (one.role === "assistant" && !one.content && !one.tool_calls) continue; // has no token
    if (one.role === "user" && before?.role === "user") before.content = joined(before.content, one.content);
    else said.push(one); // many templates refuse consecutive questions
  }
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const stream = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  return { messages: [...system, ...said], ...stream };
}

/** Return a message's content: its text, or a list of its images and its text. */
async function contentOf(node, images) {
  const blobs = await Promise.all((node.images ?? []).map((id) => images.get(id)));
  const known = blobs.filter(Boolean); // the other images were removed from this browser
  if (!known.length) return node.content;
  const urls = await Promise.all(known.map(dataUrl));
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return node.content ? [...parts, { type: "text", text: node.content }] : parts;
}

function joined(before, after) {
  if (typeof before === "string" && typeof after === "string") return `${before}\n\n${after}`;
  return [before, after].flatMap((content) => (typeof content === "string" ? { type: "text", text: content } : content));
}

const callOf = (call) => ({
  id: call.id,
  type: "function",
  function: { name: call.name, arguments: call.arguments },
});
