// Colours code and parses formulas in a worker, so that the page can stop a text that takes too long. A worker
// has no document: a reply contains only strings, from which typeset.js makes elements.

importScripts("vendor/highlight.min.js", "vendor/temml.min.js");

const MAX_EM = 30; // largest length of rules and spaces in a formula

/** Return a tree of [scope, children] and strings, or null for an unknown language. */
function colours({ language, text }) {
  if (!hljs.getLanguage(language)) return null;
  const { rootNode } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
  const plain = (node) => (typeof node === "string" ? node : [node.scope ?? "", node.children.map(plain)]);
  return rootNode.children.map(plain);
}

/** Return a tree of MathML elements. Throws an error for a formula that is not valid TeX. */
function formula({ text, isDisplay }) {
  const options = { displayMode: isDisplay, throwOnError: true, trust: false, maxSize: [MAX_EM, MAX_EM] };
  return plainMath(temml.__renderToMathMLTree(text, options));
}

function plainMath(node) {
  if (node.type) {
    const { type: tag, attributes, style } = node;
    const classes = node.classes.filter(Boolean);
    return { tag, attributes, style: { ...style }, classes, children: node.children.map(plainMath) };
  }
  if (typeof node.text === "string") return node.text;
  return { tag: "", children: (node.children ?? []).map(plainMath) };
}

onmessage = ({ data }) => {
  let reply = { tree: null };
  try {
    reply = { tree: data.kind === "code" ? colours(data) : formula(data) };
  } catch (error) {
    reply.error = String(error.message);
  }
  postMessage(reply);
};

postMessage("ready");
