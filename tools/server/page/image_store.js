// Keeps the images of messages in this browser's IndexedDB, because localStorage holds only a few megabytes.

import { newId } from "./tree.js";

const NAME = "vkbackend";
const IMAGES = "images"; // id -> {blob, used}
const NEW_MS = 60_000;
export const MAX_BYTES = 200 * 2 ** 20;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(new Error("The browser cannot store images."));
  });

export class ImageStore {
  /** `factory` is indexedDB or an object with its methods. */
  constructor(factory) {
    this.factory = factory;
    this.database = null;
    this.urls = new Map(); // id -> object URL, for images on the page
    this.blobs = new Map(); // images that could not be stored, until the page is closed
  }

  async open() {
    this.database ??= (() => {
      const opening = this.factory.open(NAME, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(IMAGES);
      return done(opening);
    })();
    return this.database;
  }

  async entries(mode = "readonly") {
    return (await this.open()).transaction(IMAGES, mode).objectStore(IMAGES);
  }

  /** Store an image, and return its id. Without storage, the image is kept until the page is closed. */
  async add(blob) {
    const id = newId();
    try {
      await done((await this.entries("readwrite")).put({ blob, used: Date.now() }, id));
    } catch {
      this.blobs.set(id, blob);
    }
    return id;
  }

  /** Return the image, or null if it was removed. */
  async get(id) {
    if (this.blobs.has(id)) return this.blobs.get(id);
    try {
      return (await done((await this.entries()).get(id)))?.blob ?? null;
    } catch {
      return null;
    }
  }

  /** Return a URL for an <img>, or null if the image was removed. */
  async url(id) {
    if (this.urls.has(id)) return this.urls.get(id);
    const blob = await this.get(id);
    if (blob && !this.urls.has(id)) this.urls.set(id, URL.createObjectURL(blob));
    return this.urls.get(id) ?? null;
  }

  /**
   * Remove images that no conversation has, and the oldest images above the limit of `most` bytes. Another tab
   * stores an image shortly before its message, so new images remain.
   */
  async clean(isUsed, { most = MAX_BYTES, newMs = NEW_MS } = {}) {
    try {
      const entries = await this.entries();
      const [ids, values] = await Promise.all([done(entries.getAllKeys()), done(entries.getAll())]);
      const all = ids.map((id, i) => ({ id, ...values[i] })).sort((a, b) => b.used - a.used);
      let total = 0;
      const isNew = (used) => used > Date.now() - newMs;
      const isKept = ({ id, used, blob }) => (isUsed(id) || isNew(used)) && (total += blob.size) <= most;
      const removed = all.filter((one) => !isKept(one));
      for (const { id } of removed) await done((await this.entries("readwrite")).delete(id));
    } catch {
      // Without storage there is nothing to remove.
    }
  }
}

export async function dataUrl(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return `data:${blob.type || "image/png"};base64,${btoa(text)}`;
}
