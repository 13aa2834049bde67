// The choice among several models, and their states. With one model there is nothing to choose.

import { element, find, number } from "./dom.js";

const CHOSEN = "vkbackend.model"; // in localStorage
const POLL_MS = 2000; // if visible

export function labelOf({ id, status }) {
  if (status.value === "loading") return `${id} (loading${status.progress ? ` ${number(100 * status.progress)} %` : ""})`;
  if (status.failed) return `${id} (failed)`;
  return status.value === "loaded" ? `${id} (loaded)` : id;
}

/** Return the model to choose: the one of the last visit, else a loaded one, else the first. */
export function choiceOf(models, last) {
  const loaded = models.find((model) => model.status.value === "loaded");
  return (models.find((model) => model.id === last) ?? loaded ?? models[0])?.id ?? "";
}

export class Models {
  /** `changed()` is called when the user chooses a model, and when the chosen model has been loaded. */
  constructor(api, storage, changed) {
    this.api = api;
    this.storage = storage;
    this.changed = changed;
    this.list = find("models");
    this.chosen = "";
    this.state = "";
    this.timer = 0;
    this.list.addEventListener("change", () => {
      this.chosen = this.list.value;
      this.storage.setItem(CHOSEN, this.chosen);
      this.state = "";
      changed();
    });
    document.addEventListener("visibilitychange", () => this.chosen && !document.hidden && this.ask());
  }

  fields() {
    return this.chosen ? { model: this.chosen } : {};
  }

  /** Return the address of an endpoint of the chosen model. A model that is not loaded stays unloaded. */
  path(endpoint) {
    return this.chosen ? `${endpoint}?model=${encodeURIComponent(this.chosen)}&autoload=false` : endpoint;
  }

  /** Read the list now, and repeatedly while the page is visible. */
  async ask() {
    clearTimeout(this.timer);
    const { data } = await this.api.json("models");
    this.show(data);
    if (!document.hidden) this.timer = setTimeout(() => this.ask().catch(() => {}), POLL_MS);
  }

  show(models) {
    if (!models.some((model) => model.id === this.chosen)) {
      this.chosen = choiceOf(models, this.storage.getItem(CHOSEN));
    }
    find("model").hidden = true;
    this.list.hidden = false;
    const labels = models.map(labelOf);
    const shown = [...this.list.options].map((option) => option.textContent);
    if (labels.join("\n") !== shown.join("\n")) {
      this.list.replaceChildren(...models.map((model, i) => element("option", { value: model.id }, labels[i])));
    }
    this.list.value = this.chosen;
    const chosen = models.find((model) => model.id === this.chosen);
    this.list.title = chosen?.status.message ?? "";
    const state = chosen?.status.value ?? "";
    const isNew = state !== this.state;
    this.state = state;
    if (isNew && state === "loaded") this.changed();
  }
}
