// A conversation is a tree of messages, in which the versions of a question or an answer are siblings. `nodes`
// maps an id to {id, parent, children, chosen, role, content, ...}. The root "" is empty. `chosen` is the
// index of the visible child.

const ROLES = new Set(["user", "assistant", "tool"]);
const TITLE_LENGTH = 60;
export const ROOT = "";

// crypto.randomUUID requires https
export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, "0")).join("");

export function newConversation(system = "") {
  const now = Date.now();
  const root = { id: ROOT, parent: null, children: [], chosen: 0, role: "root", content: "" };
  return { id: newId(), title: "", system, created: now, updated: now, nodes: { [ROOT]: root } };
}

export function path(conversation) {
  const shown = [];
  let node = conversation.nodes[ROOT];
  while ((node = conversation.nodes[node.children[node.chosen]])) shown.push(node);
  return shown;
}

export function pathTo(conversation, id) {
  const found = [];
  for (let node = conversation.nodes[id]; node && node.id !== ROOT; node = conversation.nodes[node.parent]) {
    found.unshift(node);
  }
  return found;
}

export function add(conversation, parent, role, content, more = {}) {
  const node = { id: newId(), parent, children: [], chosen: 0, role, content, ...more };
  const above = conversation.nodes[parent];
  conversation.nodes[node.id] = node;
  above.chosen = above.children.push(node.id) - 1;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = titleOf(content);
  return node;
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ") || "Image";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

/** Return a message's index among its siblings, and the number of siblings. */
export function place(conversation, node) {
  const all = conversation.nodes[node.parent].children;
  return [all.indexOf(node.id), all.length];
}

export const versions = (conversation, node) =>
  conversation.nodes[node.parent].children.map((id) => conversation.nodes[id]);

export const answerBelow = (conversation, node) => conversation.nodes[node.children[node.chosen]];

/** Show the version that is `step` positions away, with the messages below it. */
export function turn(conversation, node, step) {
  const above = conversation.nodes[node.parent];
  above.chosen = Math.max(0, Math.min(above.children.length - 1, above.children.indexOf(node.id) + step));
  return conversation.nodes[above.children[above.chosen]];
}

export function remove(conversation, node) {
  const above = conversation.nodes[node.parent];
  above.children = above.children.filter((id) => id !== node.id);
  above.chosen = Math.max(0, Math.min(above.chosen, above.children.length - 1));
  const stack = [node.id];
  while (stack.length) {
    const id = stack.pop();
    stack.push(...conversation.nodes[id].children);
    delete conversation.nodes[id];
  }
}

/** Return the tool calls of the last answer that have no result. */
export function openCalls(shown) {
  const done = new Set();
  for (const node of [...shown].reverse()) {
    if (node.role === "tool") done.add(node.tool_call_id);
    else return (node.tool_calls ?? []).filter((call) => !done.has(call.id));
  }
  return [];
}

/** Check a conversation from a file, and return only its known fields. Throws an Error. */
export function checked(value) {
  const wrong = (what) => {
    throw new Error(`not a conversation of this page: ${what}`);
  };
  const text = (one, name) => (typeof one === "string" ? one : wrong(`${name} is not a string`));
  if (typeof value?.nodes !== "object" || !value.nodes?.[ROOT]) wrong("it has no messages");
  const nodes = Object.create(null);
  const stack = [[ROOT, null]];
  while (stack.length) {
    const [id, parent] = stack.pop();
    const from = value.nodes[id];
    if (!from || nodes[id] || !Array.isArray(from.children)) wrong(`the message ${id} is missing or repeated`);
    if (id !== ROOT && !ROLES.has(from.role)) wrong(`the message ${id} has no known role`);
    const node = { id, parent, children: from.children.map((one) => text(one, "an id")) };
    node.chosen = Math.max(0, Math.min(Math.trunc(Number(from.chosen)) || 0, node.children.length - 1));
    node.role = id === ROOT ? "root" : from.role;
    node.content = text(from.content, "content");
    for (const name of ["reasoning", "error", "tool_call_id", "name"]) {
      if (from[name] !== undefined) node[name] = text(from[name], name);
    }
    if (from.stopped === true) node.stopped = true;
    if (Array.isArray(from.images)) node.images = from.images.map((one) => text(one, "an image's id"));
    if (Array.isArray(from.tool_calls)) {
      node.tool_calls = from.tool_calls.map((call) => ({
        id: text(call?.id, "a call's id"),
        name: text(call.name, "a call's name"),
        arguments: text(call.arguments, "a call's arguments"),
      }));
    }
    if (from.stats) node.stats = numbersOf(from.stats);
    nodes[id] = node;
    stack.push(...node.children.map((child) => [child, id]));
  }
  const when = (time) => (Number.isFinite(time) ? time : Date.now());
  const head = { id: text(value.id, "id"), title: text(value.title, "title"), system: text(value.system, "system") };
  return { ...head, created: when(value.created), updated: when(value.updated), nodes: { ...nodes } };
}

const numbersOf = (given) =>
  Object.fromEntries(Object.entries(given).filter(([, value]) => Number.isFinite(value)));
