// Parses formulas that occupy whole lines, for markdown.js.

const FORMULA = /^[ \t]*(\$\$|\\\[)/;
const MAX_FORMULA_LINES = 100; // this limit bounds the time for unclosed formulas

/** Return [block, next line], or null. Formulas have no blank lines, so an unclosed mark is text. */
export function formulaAt(lines, at) {
  const open = FORMULA.exec(lines[at]);
  if (!open) return null;
  const close = open[1] === "$$" ? "$$" : "\\]";
  const sourceTo = (end) => lines.slice(at, end).map((line) => line.trim()).join("\n");
  const text = [];
  let line = lines[at].slice(open[0].length);
  for (let next = at + 1; next <= at + MAX_FORMULA_LINES; next++) {
    const end = line.indexOf(close);
    text.push(end < 0 ? line : line.slice(0, end));
    if (end >= 0) {
      const isAlone = !line.slice(end + close.length).trim() && text.join("").trim();
      if (!isAlone) return null;
      return [{ type: "formula", text: text.join("\n").trim(), source: sourceTo(next), isOpen: false }, next];
    }
    line = lines[next] ?? "";
    const isEnd = next >= lines.length - 1 && !line.trim(); // the last line may still grow
    if (isEnd) return [{ type: "formula", text: "", source: sourceTo(next), isOpen: true }, lines.length];
    if (!line.trim()) return null;
  }
  return null;
}
