// Stores settings and conversations in this browser. The server receives only the messages in requests.

import { checked, newId } from "./tree.js";

const CHAT = "vkbackend.chat.";
const SETTINGS = "vkbackend.settings";
const ID = /^[0-9a-f]{24}$/; // part of the address
const KIND = "vkbackend-conversations";

export class Store {
  /** `storage` is localStorage or an object with its methods. */
  constructor(storage) {
    this.storage = storage;
    this.chats = new Map();
    for (let i = 0; i < storage.length; i++) this.refresh(storage.key(i));
  }

  /** Reload an entry that another tab changed, and return its conversation's id. */
  refresh(key) {
    if (!key?.startsWith(CHAT)) return null;
    const id = key.slice(CHAT.length);
    try {
      this.chats.set(id, checked(JSON.parse(this.storage.getItem(key) ?? "null")));
    } catch {
      this.chats.delete(id); // removed or invalid
    }
    return id;
  }

  get(id) {
    return this.chats.get(id);
  }

  /** Return the conversations that contain all `words`, in the title or in messages, the newest first. */
  list(words = "") {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (chat) => {
      const texts = Object.values(chat.nodes).map((node) => node.content);
      const all = [chat.title, ...texts].join("\n").toLowerCase();
      return wanted.every((word) => all.includes(word));
    };
    const found = [...this.chats.values()].filter((chat) => !wanted.length || has(chat));
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** Throws an Error if the storage is full. */
  save(chat) {
    this.chats.set(chat.id, chat);
    try {
      this.storage.setItem(CHAT + chat.id, JSON.stringify(chat));
    } catch {
      throw new Error("The browser's storage is full; export conversations and delete some.");
    }
  }

  hasImage(id) {
    const has = (chat) => Object.values(chat.nodes).some((node) => node.images?.includes(id));
    return [...this.chats.values()].some(has);
  }

  delete(id) {
    this.chats.delete(id);
    this.storage.removeItem(CHAT + id);
  }

  export(ids = [...this.chats.keys()]) {
    const conversations = ids.map((id) => this.chats.get(id));
    return JSON.stringify({ kind: KIND, version: 1, conversations }, null, 1);
  }

  /** Add and return the conversations of a file. Existing ids are replaced by new ids. Throws an Error. */
  import(text) {
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("The file is not JSON.");
    }
    if (file?.kind !== KIND || !Array.isArray(file.conversations)) {
      throw new Error("The file is not an export of this page.");
    }
    const found = file.conversations.map(checked); // Check all conversations before storing any.
    for (const chat of found) {
      if (this.chats.has(chat.id) || !ID.test(chat.id)) chat.id = newId();
      this.save(chat);
    }
    return found;
  }

  settings() {
    try {
      const found = JSON.parse(this.storage.getItem(SETTINGS));
      return typeof found === "object" && found ? found : {};
    } catch {
      return {};
    }
  }

  saveSettings(values) {
    this.storage.setItem(SETTINGS, JSON.stringify(values));
  }
}
