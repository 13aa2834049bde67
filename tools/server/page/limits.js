// Limits the number of elements of an answer, because hundreds of thousands freeze a browser.

const MAX_PARTS = 20_000; // of a block: items, cells, formulas and emphasized words together
export const MAX_BLOCKS = 5000; // of an answer

/** Return the number of a block's parts, or more than MAX_PARTS. */
function parts(nodes, n = 0) {
  for (const node of nodes) {
    if (n > MAX_PARTS) return n;
    n += 1;
    for (const inner of [node.nodes, node.blocks, node.items, node.head, ...(node.rows ?? [])]) {
      if (inner) n = parts(inner, n);
    }
    if (Array.isArray(node)) n = parts(node, n); // a cell
  }
  return n;
}

export function limited({ block, line, next }, lines) {
  return parts([block]) > MAX_PARTS ? { type: "text", text: lines.slice(line, next).join("\n") } : block;
}
