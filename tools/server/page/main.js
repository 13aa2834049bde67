// Connects the open conversation, buttons, keys and the server's state.

import { Api } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Devices } from "./devices.js";
import { find, number } from "./dom.js";
import { ImageStore } from "./image_store.js";
import { askKey } from "./key.js";
import { isSend } from "./message.js";
import { Messages } from "./messages.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { nextTheme, showTheme } from "./theme.js";
import { newConversation, openCalls, path, place } from "./tree.js";
import { compare } from "./versions.js";

const RETRY_MS = 1000; // while the model loads

const store = new Store(localStorage);
const images = new ImageStore(indexedDB);
const api = new Api(async (isWrong) => {
  const key = await askKey(isWrong);
  if (key && !contextSize) setTimeout(askServer); // unknown until now
  return key;
});
const input = find("input");
let contextSize = 0;

const messages = new Messages({
  edit: (node, text) => chat.edit(node, text),
  again: (node) => chat.again(node),
  turn: (node, step) => chat.turn(node, step),
  compare: (node) => chat.isRunning() || compare(chat.current, node, (step) => chat.turn(node, step)),
  remove: (node) => chat.remove(node),
  imageUrl: (id) => images.url(id),
});
const attachments = new Attachments(tell);
const settings = new Settings(store, () => chat.current, () => chat.current.title && chat.save(chat.current));
const models = new Models(api, localStorage, () => askModel());
const fields = () => ({ ...settings.fields(), ...models.fields() });
const chat = new Chat({ api, store, images, messages, settings: fields, writesTitles: () => settings.writesTitles(), show, tell });
const sidebar = new Sidebar(store, {
  open,
  tell,
  renamed: (one) => (chat.save(one), show()),
  remove: (id) => {
    chat.stop(store.get(id));
    store.delete(id);
    if (id === chat.current.id) openNew();
    else sidebar.show();
  },
});
const devices = new Devices(api, () => models.path("stats"));

// ---- view ----

function show() {
  const shown = path(chat.current);
  messages.show(chat.current, chat.running);
  sidebar.show(chat.current.id);
  showHead(shown);
  const isRunning = chat.isRunning();
  document.body.classList.toggle("busy", isRunning);
  find("stop").hidden = !isRunning;
  find("send").hidden = isRunning;
  const [call] = isRunning ? [] : openCalls(shown);
  input.placeholder = call ? `Result of ${call.name}` : "Write a message";
}

function showHead(shown) {
  const title = chat.current.title || "New conversation";
  find("title").textContent = title;
  document.title = chat.current.title ? `${title} · vkbackend` : "vkbackend";
  const last = shown.findLast((node) => node.stats?.prompt);
  const used = last ? last.stats.prompt + (last.stats.tokens ?? 0) : 0;
  const meter = find("context");
  meter.hidden = !contextSize;
  meter.querySelector("meter").max = contextSize || 1;
  meter.querySelector("meter").value = used;
  meter.querySelector("span").textContent = `${number(used)} / ${number(contextSize)}`;
}

function tell(text) {
  find("notice").hidden = !text;
  find("notice-text").textContent = text;
}

function open(id) {
  const found = store.get(id);
  if (!found) return openNew();
  setCurrent(found);
  history.replaceState(null, "", `#${id}`);
}

function openNew() {
  setCurrent(newConversation(chat.current && !chat.current.title ? chat.current.system : ""));
  history.replaceState(null, "", location.pathname);
  input.focus();
}

function setCurrent(one) {
  chat.current = one;
  show();
  openSidebar(false);
}

// ---- the server ----

async function askServer() {
  try {
    const props = await api.json("props");
    find("model").textContent = props.model_alias ?? "";
    if (props.role === "router") await models.ask();
    else showModel(props);
    tell("");
  } catch (error) {
    const progress = error.progress ? ` (${number(100 * error.progress)} %)` : "";
    const isLoading = error.status === 503 && error.code === "model_not_ready";
    tell(isLoading ? `The model is loading${progress}.` : error.message);
    if (isLoading || error.status === 0) setTimeout(askServer, RETRY_MS);
  }
}

/** Show the context and the defaults of the chosen model, which are unknown until it is loaded. */
async function askModel() {
  try {
    showModel(await api.json(models.path("props")));
  } catch (error) {
    showModel({});
    if (error.code !== "model_not_loaded") tell(error.message);
  }
}

function showModel(props) {
  contextSize = props.default_generation_settings?.n_ctx ?? 0;
  attachments.allow(Boolean(props.modalities?.vision));
  settings.showDefaults(props.default_generation_settings?.params ?? {});
  show();
}

// ---- the composer ----

async function send() {
  const text = input.value;
  if (chat.isRunning() || !(text.trim() || attachments.images.length)) return;
  input.value = "";
  const ids = await Promise.all(attachments.clear().map((blob) => images.add(blob)));
  if (!chat.send(text, ids)) return;
  history.replaceState(null, "", `#${chat.current.id}`);
}

function stop() {
  chat.stop();
  input.focus();
}

find("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
input.addEventListener("keydown", (event) => {
  if (isSend(event)) (event.preventDefault(), send());
});
find("stop").addEventListener("click", stop);
find("to-end").addEventListener("click", () => messages.toEnd());
find("close-notice").addEventListener("click", () => tell(""));

// ---- panels ----

/** On a phone, the list of conversations covers the conversation. */
function openSidebar(isOpen = true) {
  document.body.classList.toggle("sidebar-open", isOpen);
  find("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) find("search").focus();
}

const clicks = {
  menu: () => openSidebar(),
  "close-menu": () => (openSidebar(false), find("menu").focus()),
  new: openNew,
  theme: nextTheme,
  "open-settings": () => settings.open(),
  "open-shortcuts": () => find("shortcuts").showModal(),
  "toggle-devices": () => devices.toggle(),
  "close-devices": () => devices.toggle(),
};
for (const [id, action] of Object.entries(clicks)) find(id).addEventListener("click", action);
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close")?.addEventListener("click", () => dialog.close());
}

// ---- keys ----

const KEYS = {
  KeyN: openNew,
  KeyK: () => openSidebar(),
  KeyR: () => {
    const last = path(chat.current).findLast((node) => node.role === "assistant");
    if (last) chat.again(last);
  },
  KeyU: () => {
    const last = path(chat.current).findLast((node) => node.role === "user");
    if (last && !chat.isRunning()) messages.views.get(last.id).edit();
  },
  KeyV: () => {
    const last = path(chat.current).findLast((node) => place(chat.current, node)[1] > 1);
    if (!last) return;
    const [index, n] = place(chat.current, last);
    chat.turn(last, index + 1 < n ? 1 : 1 - n); // the first version follows the last version
  },
  KeyG: () => devices.toggle(),
  Comma: () => settings.open(),
  Slash: () => find("shortcuts").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && !event.isComposing) {
    if (chat.isRunning()) stop();
    else openSidebar(false), chat.titles.cancel();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

// The event means that another tab changed the store.
window.addEventListener("storage", (event) => {
  if (chat.runs.has(chat.current.id)) return;
  const id = store.refresh(event.key);
  if (id === chat.current.id && store.get(id)) setCurrent(store.get(id));
  else if (id) sidebar.show();
});
window.addEventListener("pagehide", () => {
  for (const id of chat.runs.keys()) if (store.get(id)) chat.save(store.get(id));
});

// ---- start ----

showTheme();
const wanted = location.hash.slice(1);
const draft = new URLSearchParams(location.search).get("q");
if (store.get(wanted)) open(wanted);
else openNew();
images.clean((id) => store.hasImage(id));
if (draft) input.value = draft; // a link only fills the field; the user sends it
askServer();
