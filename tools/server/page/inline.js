// Parses the Markdown inside a block. A node is a string or {type, ...}. The stack's size is limited, so the
// time is linear.

const MAX_OPEN = 32; // open marks
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const PLAIN = /[^\\`*_~[\]!<&\n:$]+/y;
const RUN = { "*": /\*+/y, _: /_+/y, "~": /~+/y, "`": /`+/y };
const BARE_URL = /:\/\/[^\s<>"`]{0,2000}[^\s<>"`.,;:!?'*_~)\]]/y; // not the final punctuation
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]{0,2000})>/iy;
// A "$" that is not escaped.
const DOLLAR = /(?<!\\)\$/g;
// Matches (address "title"). Lengths are limited, because repeated "[](a" would take quadratic time.
const TARGET =
  /\([ \n]?(?:<([^<>\n]{0,2000})>|((?:[^\s()\\]|\\.|\([^\s()]{0,200}\)){0,2000}))(?:[ \n](?:"[^"]{0,500}"|'[^']{0,500}'))?[ \n]?\)/y;

/** Return the address of a link, or null for an address that is not allowed. */
export function safeHref(text) {
  if (!/^(https?:\/\/|mailto:)./i.test(text)) return null;
  return URL.canParse(text) ? text : null;
}

function match(expression, text, at) {
  expression.lastIndex = at;
  return expression.exec(text);
}

export function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.stack = [{ mark: "", nodes: [] }];
    this.unclosed = new Set(); // lengths of unclosed backtick runs
    this.ends = {}; // the next position of each mark that ends a formula
  }

  get top() {
    return this.stack[this.stack.length - 1];
  }

  put(node, frame = this.top) {
    const { nodes } = frame;
    const last = nodes.length - 1;
    if (typeof node === "string" && typeof nodes[last] === "string") nodes[last] += node;
    else nodes.push(node);
  }

  /** Convert the marks of stack frames to text, until `depth` frames remain. */
  flatten(depth) {
    while (this.stack.length > depth) {
      const frame = this.stack.pop();
      this.put(frame.mark);
      frame.nodes.forEach((node) => this.put(node));
    }
  }

  parse() {
    let at = 0;
    while (at < this.text.length) at = this.step(at, this.text[at]);
    this.flatten(1);
    return this.stack[0].nodes;
  }

  /** Parse the node at the position `at`, and return the position of its end. */
  step(at, char) {
    const plain = match(PLAIN, this.text, at);
    if (plain) return this.put(plain[0]), at + plain[0].length;
    switch (char) {
      case "\\":
        return this.formula(at, "\\(", "\\)") ?? this.formula(at, "\\[", "\\]") ?? this.escape(at);
      case "$":
        return this.formula(at, "$$", "$$") ?? this.dollar(at) ?? (this.put("$"), at + 1);
      case "`":
        return this.code(at);
      case "*":
      case "_":
      case "~":
        return this.emphasis(at, char);
      case "[":
        return this.open(at, "[");
      case "!":
        return this.text[at + 1] === "[" ? this.open(at, "![") : (this.put("!"), at + 1);
      case "]":
        return this.close(at);
      case "<":
        return this.angle(at);
      case ":":
        return this.bare(at);
      case "&":
        return this.entity(at);
    }
    trimEnd(this.top.nodes);
    this.put({ type: "break" });
    return at + 1;
  }

  escape(at) {
    const next = this.text[at + 1];
    if (next === "\n") return at + 1;
    if (next === undefined || !ESCAPABLE.test(next)) return this.put("\\"), at + 1;
    return this.put(next), at + 2;
  }

  /** Parse a formula from `open` to `close`. Return undefined if there is none. */
  formula(at, open, close) {
    if (!this.text.startsWith(open, at)) return undefined;
    const from = at + open.length;
    const end = this.endOf(close, from);
    const text = end < 0 ? "" : this.text.slice(from, end).trim();
    if (!text) return undefined;
    const after = end + close.length;
    this.put({ type: "formula", text, source: this.text.slice(at, after), isDisplay: open !== "\\(" });
    return after;
  }

  /** Parse $a$. A space before the closing "$", or a digit or "$" after it, means a price, as in "$5 or $10". */
  dollar(at) {
    const from = at + 1;
    const end = this.endOf("$", from);
    const isFormula = end > from && !/^\s|\s$/.test(this.text.slice(from, end)) && !/[\d$]/.test(this.text[end + 1] ?? "");
    if (!isFormula) return undefined;
    this.put({ type: "formula", text: this.text.slice(from, end), source: this.text.slice(at, end + 1), isDisplay: false });
    return end + 1;
  }

  /** Return the next position of a mark, or -1. Positions are kept, so the total time is linear. */
  endOf(mark, from) {
    const kept = this.ends[mark];
    if (kept !== undefined && (kept < 0 || kept >= from)) return kept;
    DOLLAR.lastIndex = from;
    const next = mark === "$" ? (DOLLAR.exec(this.text)?.index ?? -1) : this.text.indexOf(mark, from);
    return (this.ends[mark] = next);
  }

  entity(at) {
    const name = Object.keys(ENTITIES).find((one) => this.text.startsWith(one, at));
    this.put(name ? ENTITIES[name] : "&");
    return at + (name ?? "&").length;
  }

  code(at) {
    const mark = match(RUN["`"], this.text, at)[0];
    const from = at + mark.length;
    if (!this.unclosed.has(mark.length)) {
      for (let end = this.text.indexOf("`", from); end >= 0; ) {
        const n = match(RUN["`"], this.text, end)[0].length;
        if (n === mark.length) {
          const inner = this.text.slice(from, end).replaceAll("\n", " ");
          const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
          this.put({ type: "code", text: padded ? inner.slice(1, -1) : inner });
          return end + n;
        }
        end = this.text.indexOf("`", end + n);
      }
      this.unclosed.add(mark.length);
    }
    return this.put(mark), from;
  }

  emphasis(at, char) {
    const mark = match(RUN[char], this.text, at)[0];
    const before = charBefore(this.text, at);
    const after = charAfter(this.text, at + mark.length);
    const left = !isSpace(after) && (!isSign(after) || isSpace(before) || isSign(before));
    const right = !isSpace(before) && (!isSign(before) || isSpace(after) || isSign(after));
    const opens = left && (char !== "_" || !right || isSign(before));
    const closes = right && (char !== "_" || !left || isSign(after));
    let n = mark.length;
    while (closes && n > 0) {
      const used = this.closeEmphasis(char, n, mark.length, opens);
      if (!used) break;
      n -= used;
    }
    if (n > 0 && opens && this.stack.length < MAX_OPEN && (char !== "~" || n <= 2)) {
      this.stack.push({ mark: char.repeat(n), nodes: [], char, n, whole: mark.length, closes });
    } else if (n > 0) this.put(char.repeat(n));
    return at + mark.length;
  }

  /** Close the nearest emphasis that `char` opened. Return the number of marks used. */
  closeEmphasis(char, n, whole, opens) {
    for (let i = this.stack.length - 1; i > 0; i--) {
      const frame = this.stack[i];
      if (frame.char === undefined) return 0; // an open link wins
      if (frame.char !== char || (char === "~" && frame.n !== n)) continue;
      const sum = frame.whole + whole; // by CommonMark's rule of three, *a**b* is one emphasis
      if ((opens || frame.closes) && sum % 3 === 0 && whole % 3 !== 0) continue;
      this.flatten(i + 1);
      const used = char === "~" ? n : Math.min(2, n, frame.n);
      const type = char === "~" ? "del" : used === 2 ? "strong" : "em";
      const node = { type, nodes: frame.nodes };
      this.stack.pop();
      frame.n -= used;
      if (frame.n) this.stack.push({ ...frame, mark: char.repeat(frame.n), nodes: [] });
      this.put(node);
      return used;
    }
    return 0;
  }

  open(at, mark) {
    if (this.stack.length >= MAX_OPEN) this.put(mark);
    else this.stack.push({ mark, nodes: [] });
    return at + mark.length;
  }

  close(at) {
    let i = this.stack.length - 1;
    while (i > 0 && this.stack[i].char !== undefined) i--;
    if (i === 0) return this.put("]"), at + 1;
    const found = match(TARGET, this.text, at + 1);
    if (!found) {
      const [frame] = this.stack.splice(i, 1); // The text is not a link, but marks inside it stay open.
      [frame.mark, ...frame.nodes].forEach((node) => this.put(node, this.stack[i - 1]));
      return this.put("]"), at + 1;
    }
    this.flatten(i + 1);
    const { nodes, mark } = this.stack.pop();
    const target = (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
    const href = safeHref(target);
    if (href) this.put({ type: "link", href, nodes: withoutLinks(nodes), image: mark === "![" });
    else [mark, ...nodes, "]" + found[0]].forEach((node) => this.put(node));
    return at + 1 + found[0].length;
  }

  angle(at) {
    const found = match(ANGLE_URL, this.text, at);
    if (!found || !safeHref(found[1])) return this.put("<"), at + 1;
    this.put({ type: "link", href: found[1], nodes: [found[1]] });
    return at + found[0].length;
  }

  /** Parse a bare address, whose scheme was already parsed as text. */
  bare(at) {
    const { nodes } = this.top;
    const last = nodes[nodes.length - 1];
    const scheme = typeof last === "string" ? /(?<![A-Za-z0-9])https?$/i.exec(last.slice(-6))?.[0] : undefined;
    const found = scheme && match(BARE_URL, this.text, at);
    const href = found && safeHref(scheme + found[0]);
    if (!href) return this.put(":"), at + 1;
    nodes[nodes.length - 1] = last.slice(0, -scheme.length);
    this.put({ type: "link", href, nodes: [href] });
    return at + found[0].length;
  }
}

const isSpace = (char) => char === "" || /\s/u.test(char);
const isSign = (char) => /[\p{P}\p{S}]/u.test(char);
const charBefore = (text, at) => (at > 0 ? [...text.slice(Math.max(0, at - 2), at)].pop() : "");
const charAfter = (text, at) => (at < text.length ? String.fromCodePoint(text.codePointAt(at)) : "");

function trimEnd(nodes) {
  const last = nodes.length - 1;
  if (typeof nodes[last] === "string") nodes[last] = nodes[last].trimEnd();
}

const withoutLinks = (nodes) =>
  nodes.flatMap((node) => {
    if (node.type === "link") return withoutLinks(node.nodes);
    return node.nodes ? [{ ...node, nodes: withoutLinks(node.nodes) }] : [node];
  });
