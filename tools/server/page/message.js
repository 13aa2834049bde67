// The element of a message, with its text, thoughts, calls, buttons and editor.

import { button, copy, element, number } from "./dom.js";
import { folded } from "./fold.js";
import { LiveText, markdown } from "./render.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };

export class MessageView {
  constructor(node, actions, isRunning) {
    this.node = node;
    this.actions = actions;
    this.body = element("div", { className: "body" });
    this.images = element("ul", { className: "images", "aria-label": "Images", hidden: !node.images?.length });
    this.thought = element("div", { className: "body" });
    this.thinking = element("details", { className: "thinking", hidden: true }, element("summary", {}, "Thoughts"), this.thought);
    this.calls = element("div", { className: "calls" });
    this.error = element("p", { className: "error", role: "alert", hidden: true });
    this.stopped = element("p", { className: "stopped", hidden: true }, "Stopped");
    this.stats = element("span", { className: "stats" });
    this.counter = element("span", { className: "counter" });
    this.turns = element(
      "span",
      { className: "turns change", hidden: true, role: "group", "aria-label": "Versions" },
      button("‹", () => actions.turn(node, -1), { "aria-label": "Earlier version" }),
      this.counter,
      button("›", () => actions.turn(node, 1), { "aria-label": "Later version" }),
      button("Compare", () => actions.compare(node), { className: "compare" }),
    );
    const name = NAMES[node.role] + (node.name ? ` of ${node.name}` : "");
    this.foot = element("div", { className: "foot" }, this.turns, ...this.buttons(), this.stats);
    this.element = element(
      "article",
      { className: `message ${node.role}`, tabIndex: -1, "aria-label": name },
      element("h2", {}, name),
      this.thinking,
      this.images,
      this.body,
      this.calls,
      this.stopped,
      this.error,
      this.foot,
    );
    if (isRunning) {
      this.live = new LiveText(this.body);
      this.liveThought = new LiveText(this.thought);
    } else this.fill();
    if (node.images?.length) this.showImages();
    this.update(isRunning);
  }

  async showImages() {
    const urls = await Promise.all(this.node.images.map((id) => this.actions.imageUrl(id)));
    const missing = () => element("span", { className: "quiet" }, "An image that this browser no longer has.");
    const images = urls.map((src, i) => (src ? element("img", { src, alt: `Image ${i + 1}` }) : missing()));
    this.images.replaceChildren(...images.map((image) => element("li", {}, image)));
  }

  buttons() {
    const { node, actions } = this;
    const change = (text, action) => button(text, action, { className: "change" }); // hidden during an answer
    const made = [button("Copy", (event) => copy(node.content, event.target))];
    if (node.role === "user") made.push(change("Edit", () => this.edit()));
    if (node.role === "assistant") made.push(change("Regenerate", () => actions.again(node)));
    made.push(change("Delete", () => actions.remove(node)));
    return made;
  }

  /** Show the complete text, which is Markdown only in answers. */
  fill() {
    const { node } = this;
    if (node.role === "assistant") this.body.replaceChildren(markdown(node.content));
    else this.body.replaceChildren(...folded(node.role === "tool" ? "pre" : "p", node.content));
    this.body.hidden = Boolean(node.images?.length) && !node.content;
    if (node.reasoning) this.thought.replaceChildren(markdown(node.reasoning));
  }

  /** `read` is the part of the prompt that the model has read, or null. */
  update(isRunning, read = null) {
    const { node } = this;
    if (this.live) {
      this.liveThought.update(node.reasoning ?? "", !isRunning);
      this.live.update(node.content, !isRunning);
      if (!isRunning) this.live = null;
    }
    this.element.setAttribute("aria-busy", String(isRunning));
    this.element.classList.toggle("running", isRunning);
    this.thinking.hidden = !node.reasoning;
    this.thinking.firstChild.textContent = isRunning && !node.content ? "Thinking …" : "Thoughts";
    this.showCalls(node.tool_calls ?? []);
    this.stopped.hidden = !node.stopped;
    this.error.hidden = !node.error;
    this.error.textContent = node.error ?? "";
    this.stats.textContent = read === null ? statsText(node.stats) : `reading the prompt: ${number(Math.floor(100 * read))} %`;
  }

  showCalls(calls) {
    while (this.calls.childElementCount > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, i) => {
      const shown = this.calls.children[i] ?? this.calls.appendChild(callElement());
      shown.querySelector("strong").textContent = call.name;
      shown.querySelector("code").textContent = pretty(call.arguments);
    });
  }

  showPlace([index, n]) {
    const text = `${index + 1}/${n}`;
    if (text === this.counter.textContent) return; // the usual case
    this.counter.textContent = text;
    this.turns.hidden = n < 2;
    this.turns.children[0].disabled = index === 0;
    this.turns.children[2].disabled = index === n - 1;
  }

  /** Edit a question. The original question remains as a different branch. */
  edit() {
    if (this.element.querySelector("form")) return;
    const area = element("textarea", { value: this.node.content, rows: 3, "aria-label": "Edit the message" });
    const close = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.element.focus();
    };
    const send = () => {
      close();
      if (area.value.trim() || this.node.images) this.actions.edit(this.node, area.value);
    };
    const form = element(
      "form",
      { className: "edit", onsubmit: (event) => (event.preventDefault(), send()) },
      area,
      element("div", { className: "row" }, element("button", { type: "submit", className: "primary" }, "Send"), button("Cancel", close)),
    );
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") (event.stopPropagation(), close());
      if (isSend(event)) (event.preventDefault(), send());
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.focus();
  }
}

/** Return whether Enter was pressed to send. Enter can also end the input of a Chinese or Japanese word. */
export const isSend = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

const callElement = () =>
  element("div", { className: "call" }, element("p", {}, "Calls ", element("strong")), element("pre", { tabIndex: 0, role: "region", "aria-label": "Arguments" }, element("code")));

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // the JSON is incomplete
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

function statsText(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.tokens) parts.push(`${number(stats.tokens)} tokens`);
  if (stats.perSecond) parts.push(`${number(stats.perSecond)} tokens/s`);
  if (stats.drafted) parts.push(`${number((100 * stats.accepted) / stats.drafted)} % of drafts accepted`);
  if (stats.imageMs) {
    const of = (stats.imageParts ?? []).map(([part, ms]) => `${part} ${seconds(ms)}`);
    parts.push(`images ${seconds(stats.imageMs)}${of.length ? ` (${of.join(", ")})` : ""}`);
  }
  if (stats.prompt) {
    const kept = stats.cached ? `, ${number(stats.cached)} cached` : "";
    const time = stats.promptMs ? ` in ${seconds(stats.promptMs)}` : "";
    parts.push(`prompt ${number(stats.prompt)}${time}${kept}`);
  }
  return parts.join(" · ");
}
