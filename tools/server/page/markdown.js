// Parses Markdown into blocks for render.js. HTML remains text, and images become links.
// A block is {type, ...}. The types are heading, paragraph, code, formula, quote, list, table,
// rule and text.

import { formulaAt } from "./formulas.js";
import { parseInline } from "./inline.js";
import { MAX_BLOCKS, limited } from "./limits.js";

const MAX_DEPTH = 12; // nested lists and quotes
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}(?! )| +|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\] /;

export function parse(text) {
  const lines = linesOf(text);
  return parseLines(lines, 0).map((found) => limited(found, lines));
}

/** A parser of growing text. Only the blocks that may still change are parsed again. */
export class BlockStream {
  constructor() {
    this.offset = 0; // where settled blocks end
    this.left = MAX_BLOCKS; // how many more blocks may follow; the last one holds the rest as plain text
  }

  /** Parse the text so far. Return newly settled blocks and blocks that may still change. */
  push(text, isWhole = false) {
    const lines = text.slice(this.offset).split("\n");
    const plain = lines.map(cleaned);
    const found = parseLines(plain, 0, this.left);
    // An incomplete line "-" may become "- item" and join the previous block. A table is recognized by its
    // second line.
    const isSure = found.length > 0 && isDefinite(found.at(-1), lines.length);
    const n = isWhole ? found.length : Math.max(0, found.length - (isSure ? 1 : 2));
    if (isWhole) this.offset = text.length;
    else if (n) for (let i = 0; i < found[n].line; i++) this.offset += lines[i].length + 1;
    const blocks = found.map((one) => limited(one, plain));
    if (blocks.length === this.left) {
      blocks[this.left - 1] = { type: "text", text: plain.slice(found.at(-1).line).join("\n") };
    }
    this.left -= n;
    return { settled: blocks.slice(0, n), open: blocks.slice(n) };
  }
}

/** Return whether later text cannot join a block with the previous block. */
function isDefinite({ block, line, next }, nLines) {
  // Text after the formula's end makes the block a paragraph.
  if (block.type === "formula") return !block.isOpen && next < nLines;
  return line + (block.type === "table" ? 1 : 0) < nLines - 1;
}

const cleaned = (line) => (line.endsWith("\r") ? line.slice(0, -1) : line);
const linesOf = (text) => text.split("\n").map(cleaned);
const isBlank = (line) => line.trim() === "";

/** Return the columns of a line's indentation. Tab stops are multiples of four. */
function indentOf(line) {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns++;
    else if (char === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function dedent(line, n) {
  let columns = 0;
  let i = 0;
  for (; i < line.length && columns < n; i++) {
    if (line[i] === " ") columns++;
    else if (line[i] === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return " ".repeat(Math.max(0, columns - n)) + line.slice(i);
}

/** Parse lines into at most `most` blocks, whose first line determines their type. */
function parseLines(lines, depth, most = Infinity) {
  const found = [];
  let at = 0;
  while (at < lines.length && found.length < most) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    found.push({ block, line: at, next });
    at = next;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, nodes: parseInline(heading[2] ?? "") }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  const formula = formulaAt(lines, at);
  if (formula) return formula;
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if (itemOf(line)) return listAt(lines, at, depth);
  }
  return isTable(lines, at) ? tableAt(lines, at) : paragraphAt(lines, at, depth);
}

function codeAt(lines, at, [, mark, language]) {
  const indent = indentOf(lines[at]);
  const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \t]*$`);
  const text = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    if (end.test(lines[next])) return [{ type: "code", language, text: text.join("\n") }, next + 1];
    text.push(indent ? dedent(lines[next], indent) : lines[next]);
  }
  if (text.at(-1) === "") text.pop(); // the line is incomplete
  return [{ type: "code", language, text: text.join("\n") }, next];
}

function quoteAt(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length; next++) {
    if (QUOTE.test(lines[next])) inner.push(lines[next].replace(QUOTE, ""));
    else if (isBlank(lines[next]) || startsBlock(lines, next, depth)) break;
    else inner.push(lines[next]); // lazy continuation
  }
  return [{ type: "quote", blocks: parseLines(inner, depth + 1).map((one) => one.block) }, next];
}

function itemOf(line) {
  const found = ITEM.exec(line.replace(/^[ \t]+/, (space) => " ".repeat(indentOf(space))));
  if (!found || RULE.test(line)) return null;
  const [all, space, mark] = found;
  const kind = mark.length === 1 ? "*" : mark.at(-1); // "1." and "1)" are different lists
  return { indent: space.length, column: Math.max(all.length, space.length + mark.length + 1), mark, kind };
}

function listAt(lines, at, depth) {
  const first = itemOf(lines[at]);
  const items = [];
  let next = at;
  let isLoose = false;
  while (next < lines.length) {
    const item = itemOf(lines[next]);
    // Below "1.", models indent items by two or by three columns.
    if (!item || item.kind !== first.kind || item.indent > first.indent + 1) break;
    const text = lines[next].trimStart().slice(item.mark.length);
    const inner = [text.replace(/^ {1,4}(?! )|^ /, "")];
    let blanks = 0;
    for (next++; next < lines.length; next++) {
      const line = lines[next];
      if (isBlank(line)) {
        blanks++;
        continue;
      }
      const isInside = indentOf(line) >= Math.min(item.column, item.indent + 2);
      if (!isInside && (blanks || itemOf(line) || startsBlock(lines, next, depth))) break;
      isLoose ||= blanks > 0 && indentOf(line) < item.column + 2 && !itemOf(line);
      for (; blanks > 0; blanks--) inner.push("");
      inner.push(dedent(line, item.column));
    }
    items.push(itemBlock(inner, depth));
    if (blanks && itemOf(lines[next] ?? "")?.kind === first.kind) isLoose = true;
  }
  const start = first.kind === "*" ? null : Number.parseInt(first.mark, 10);
  return [{ type: "list", start, isLoose, items }, next];
}

function itemBlock(lines, depth) {
  const task = TASK.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  const blocks = parseLines(lines, depth + 1).map((one) => one.block);
  return { task: task ? task[1] !== " " : null, blocks };
}

/** Return whether a line ends the paragraph above. The item "1984." does not, because it may be a year. */
function startsBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (depth < MAX_DEPTH && QUOTE.test(line)) return true;
  if (formulaAt(lines, at)) return true;
  const item = depth < MAX_DEPTH && itemOf(line);
  if (item && line.trim() !== item.mark && (item.kind === "*" || Number.parseInt(item.mark, 10) === 1)) return true;
  return isTable(lines, at);
}

function paragraphAt(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines, next, depth)) next++;
  const text = lines.slice(at, next).map((line) => line.trim()).join("\n");
  return [{ type: "paragraph", nodes: parseInline(text) }, next];
}

// ---- tables ----

const cellsOf = (line) => {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
};

function isTable(lines, at) {
  const [head, marks] = [lines[at], lines[at + 1]];
  if (marks === undefined || !head.includes("|") || !marks.includes("-") || !DELIMITERS.test(marks)) return false;
  return cellsOf(head).length === cellsOf(marks).length;
}

function tableAt(lines, at) {
  const align = cellsOf(lines[at + 1]).map((mark) => {
    if (mark.endsWith(":")) return mark.startsWith(":") ? "center" : "right";
    return "left";
  });
  const row = (line) => align.map((_, i) => parseInline(cellsOf(line)[i] ?? ""));
  const rows = [];
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|") && !isBlank(lines[next])) rows.push(row(lines[next++]));
  return [{ type: "table", align, head: row(lines[at]), rows }, next];
}
