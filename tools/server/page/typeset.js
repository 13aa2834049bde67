// Shows code in colours and formulas as MathML. A worker reads the text with libraries (worker.js), and this
// module makes elements from the reply. Elements have only the tags, attributes and styles in this module's
// lists.

import { element } from "./dom.js";

const DEADLINE_MS = 2000; // A text whose layout takes longer remains plain.
const MAX_CODE = 100_000; // characters
const MAX_FORMULA = 5000;
const MAX_DEPTH = 60;
const MAX_KEPT = 500; // formulas
const MATH = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(
  ("math mrow mi mo mn mtext ms mspace mfrac msqrt mroot msub msup msubsup munder mover munderover " +
    "mmultiscripts mprescripts none mtable mtr mtd mpadded mphantom menclose mstyle").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel mathvariant fence form stretchy separator symmetric largeop movablelimits " +
    "accent accentunder lspace rspace width height depth voffset minsize maxsize linethickness columnalign " +
    "rowspacing notation linebreak").split(" "),
);
const STYLES = new Set(
  ("color fontWeight display width height padding paddingTop paddingRight paddingBottom paddingLeft marginLeft " +
    "border borderTop borderRight borderBottom borderLeft textAlign mathDepth justifyContent").split(" "),
);
const CLASS = /^[a-z][a-z0-9-]{0,30}$/;

// ---- the worker ----

/** Runs one job at a time. A job that exceeds the deadline ends the worker; the next job gets a new one. */
class Typesetter {
  constructor() {
    this.worker = null;
    this.jobs = [];
    this.isBusy = false;
  }

  /** Resolve to the tree, or to null if the text cannot be read. */
  tree(job) {
    return new Promise((resolve) => {
      this.jobs.push({ job, resolve });
      this.next();
    });
  }

  async next() {
    if (this.isBusy || !this.jobs.length) return;
    this.isBusy = true;
    const { job, resolve } = this.jobs.shift();
    resolve(await this.run(job).catch(() => null));
    this.isBusy = false;
    this.next();
  }

  async run(job) {
    this.worker ??= await started();
    if (!this.worker) return null;
    this.worker.postMessage(job);
    const reply = await message(this.worker, DEADLINE_MS);
    if (reply) return reply.tree;
    this.worker.terminate();
    this.worker = null;
    return null;
  }
}

async function started() {
  const worker = new Worker(new URL("worker.js", import.meta.url));
  return (await message(worker, 15 * DEADLINE_MS)) === "ready" ? worker : null;
}

/** Resolve to the worker's next message, or to null after an error or the deadline. */
function message(worker, deadline) {
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(null), deadline);
    worker.onmessage = ({ data }) => (clearTimeout(timer), resolve(data));
    worker.onerror = (event) => (event.preventDefault(), clearTimeout(timer), resolve(null));
  });
}

const typesetter = new Typesetter();

// ---- only visible elements are typeset ----

const actions = new WeakMap();
let observer = null;

function whenVisible(target, action) {
  observer ??= new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target: shown } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(shown);
        actions.get(shown)();
      }
    },
    { rootMargin: "100% 0px" },
  );
  actions.set(target, action);
  observer.observe(target);
}

// ---- code ----

export function colour(code, language) {
  const text = code.textContent;
  if (!language || !text || text.length > MAX_CODE) return;
  whenVisible(code, async () => {
    const tree = await typesetter.tree({ kind: "code", language: language.toLowerCase(), text });
    if (!tree) return;
    const shown = document.createDocumentFragment();
    shown.append(...tree.map((node) => coloured(node, 0)));
    if (shown.textContent === text) code.replaceChildren(shown); // never lose a character
  });
}

function coloured(node, depth) {
  if (typeof node === "string") return node;
  const [scope, children] = node;
  const classes = scope.split(".").map((name) => name.replaceAll("_", "")).filter((name) => CLASS.test(name));
  const inner = depth < MAX_DEPTH ? children.map((child) => coloured(child, depth + 1)) : [textOf(children)];
  return element("span", { className: classes.map((name) => `c-${name}`).join(" ") }, ...inner);
}

const textOf = (nodes) => nodes.map((node) => (typeof node === "string" ? node : textOf(node[1]))).join("");

// ---- formulas ----

const known = new Map(); // formula -> tree or null

/** Return an element with the formula's source, which becomes MathML when it is visible. */
export function formula({ text, source, isDisplay }) {
  const key = `${isDisplay} ${text}`;
  const shown = element("span", { className: isDisplay ? "formula display" : "formula" }, source);
  const fill = (tree) => tree && shown.replaceChildren(mathElement(tree, 0));
  if (known.has(key)) fill(known.get(key));
  else if (text.length <= MAX_FORMULA) {
    whenVisible(shown, async () => {
      if (!known.has(key)) keep(key, await typesetter.tree({ kind: "formula", text, isDisplay }));
      fill(known.get(key));
    });
  }
  return shown;
}

function keep(key, tree) {
  if (known.size >= MAX_KEPT) known.delete(known.keys().next().value);
  known.set(key, tree);
}

function mathElement(node, depth) {
  if (typeof node === "string") return document.createTextNode(node);
  const shown = TAGS.has(node.tag) ? document.createElementNS(MATH, node.tag) : document.createDocumentFragment();
  if (shown.setAttribute) {
    for (const [name, value] of Object.entries(node.attributes)) {
      if (ATTRIBUTES.has(name)) shown.setAttribute(name, value);
    }
    for (const [name, value] of Object.entries(node.style)) if (STYLES.has(name)) shown.style[name] = value;
    const classes = node.classes.filter((name) => CLASS.test(name));
    if (classes.length) shown.setAttribute("class", classes.join(" "));
  }
  if (depth < MAX_DEPTH) shown.append(...node.children.map((child) => mathElement(child, depth + 1)));
  return shown;
}
