// Renders Markdown blocks with only createElement and text nodes. Links may be http, https or mailto. Images
// become links and are never loaded.

import { announce, appended, button, copy, element } from "./dom.js";
import { BlockStream, parse } from "./markdown.js";
import { colour, formula } from "./typeset.js";

const MAX_READ = 10_000; // number of characters of a block that screen readers announce
const EMPHASIS = { strong: "strong", em: "em", del: "del" };

function inlines(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.type === "break") return element("br");
    if (node.type === "code") return element("code", {}, node.text);
    if (node.type === "formula") return formula(node);
    if (node.type === "link") {
      const mark = node.image ? ["image: "] : [];
      const link = { href: node.href, rel: "noopener noreferrer", target: "_blank" };
      return element("a", link, mark, inlines(node.nodes));
    }
    return element(EMPHASIS[node.type], {}, inlines(node.nodes));
  });
}

function codeBlock({ language, text }, isSettled) {
  const code = element("code", {}, text);
  if (isSettled) colour(code, language);
  const head = element(
    "div",
    { className: "code-head" },
    element("span", {}, language),
    button("Copy", (event) => copy(code.textContent, event.target), { "aria-label": "Copy the code" }),
  );
  // Focus lets the keyboard scroll the code.
  const label = `Code${language ? ` in ${language}` : ""}`;
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0, role: "region", "aria-label": label }, code));
}

function list({ start, isLoose, items }, isSettled) {
  const made = element(start === null ? "ul" : "ol", start === null ? {} : { start });
  for (const { task, blocks } of items) {
    const inner = blocks.flatMap((block) =>
      block.type === "paragraph" && !isLoose ? inlines(block.nodes) : [rendered(block, isSettled)],
    );
    if (task !== null) {
      inner.unshift(element("span", { role: "img", "aria-label": task ? "done" : "open" }, task ? "☑" : "☐"), " ");
    }
    made.append(element("li", { className: task === null ? "" : "task" }, inner));
  }
  return made;
}

function table({ align, head, rows }) {
  const cell = (tag) => (nodes, i) => element(tag, { className: align[i] }, inlines(nodes));
  const row = (tag) => (cells) => element("tr", {}, cells.map(cell(tag)));
  const made = element("table", {}, element("thead", {}, row("th")(head)), element("tbody", {}, rows.map(row("td"))));
  return element("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, made);
}

/** Return a block's element. Code is coloured only in settled blocks, because a growing block changes. */
export function rendered(block, isSettled = true) {
  switch (block.type) {
    case "heading": // The page itself has h1 and h2.
      return element(`h${Math.min(6, block.level + 2)}`, {}, inlines(block.nodes));
    case "paragraph":
      return element("p", {}, inlines(block.nodes));
    case "code":
      return codeBlock(block, isSettled);
    case "formula":
      return element("p", {}, block.isOpen ? block.source : formula({ ...block, isDisplay: true }));
    case "quote":
      return element("blockquote", {}, block.blocks.map((inner) => rendered(inner, isSettled)));
    case "list":
      return list(block, isSettled);
    case "table":
      return table(block);
    case "text":
      return element("p", { className: "plain" }, block.text);
    default:
      return element("hr");
  }
}

export function markdown(text) {
  const live = new LiveText(document.createDocumentFragment(), () => {});
  live.update(text, true);
  return live.container;
}

/** A renderer of growing text. Elements of settled blocks never change, so screen readers read them once. */
export class LiveText {
  /** `read(text)` announces a settled block. */
  constructor(container, read = announce) {
    this.container = container;
    this.read = read;
    this.stream = new BlockStream();
    this.open = []; // elements that may change
    this.kinds = [];
  }

  update(text, isWhole = false) {
    const { settled, open } = this.stream.push(text, isWhole);
    if (!settled.length && this.extendsCode(open)) return;
    this.open.forEach((one) => one.remove());
    for (const block of settled) {
      const made = rendered(block);
      this.container.append(made);
      this.read(made.textContent.slice(0, MAX_READ));
    }
    this.open = open.map((block) => rendered(block, false));
    this.kinds = open.map((block) => block.type);
    appended(this.container, this.open);
  }

  /** Append to a growing code block, so that it keeps its element and scroll position. */
  extendsCode(open) {
    if (open.length !== 1 || open[0].type !== "code" || this.kinds.join() !== "code") return false;
    const code = this.open[0].querySelector("code");
    if (!open[0].text.startsWith(code.textContent)) return false;
    code.firstChild ? code.firstChild.appendData(open[0].text.slice(code.textContent.length)) : code.append(open[0].text);
    return true;
  }
}
