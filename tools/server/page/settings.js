// The settings of requests, which have the API's names. Empty fields are not sent.

import { element, find } from "./dom.js";

// [name, min, max, step, help]
const NUMBERS = [
  ["temperature", 0, 10, 0.05, "0 takes the likeliest token; more is freer"],
  ["top_k", 0, 1000, 1, "only the k likeliest tokens; 0: all"],
  ["top_p", 0, 1, 0.01, "only the likeliest tokens with this total probability"],
  ["min_p", 0, 1, 0.01, "only tokens with at least this share of the top probability"],
  ["typical_p", 0, 1, 0.01, "only tokens of typical surprise; 1: off"],
  ["top_n_sigma", -1, 10, 0.1, "only tokens within n standard deviations of the best; -1: off"],
  ["xtc_probability", 0, 1, 0.01, "chance to drop the likeliest tokens"],
  ["xtc_threshold", 0, 1, 0.01, "applies to tokens above this probability"],
  ["dynatemp_range", 0, 10, 0.05, "temperature varies with entropy by up to this"],
  ["dynatemp_exponent", 0, 10, 0.1, "exponent of that entropy"],
  ["repeat_penalty", 0, 10, 0.05, "penalty for tokens used before; 1: off"],
  ["repeat_last_n", -1, 1000000, 1, "tokens to look back; 0: off, -1: all"],
  ["presence_penalty", -10, 10, 0.1, "penalty for any token used before"],
  ["frequency_penalty", -10, 10, 0.1, "penalty for each earlier use"],
  ["dry_multiplier", 0, 10, 0.1, "penalty for repeated phrases; 0: off"],
  ["dry_base", 0, 10, 0.05, "its growth with the phrase's length"],
  ["dry_allowed_length", 0, 1000, 1, "only phrases of at least this length"],
  ["mirostat", 0, 2, 1, "keeps surprise constant; 0: off"],
  ["mirostat_tau", 0, 100, 0.1, "the target surprise"],
  ["mirostat_eta", 0, 10, 0.01, "its learning rate"],
  ["seed", -1, 4294967295, 1, "same seed, same answer; -1: random"],
  ["max_tokens", 1, 1000000, 1, "maximum length of an answer"],
];
const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];
const COMMON = 4; // always visible

/** Convert the form's values to request fields. Throws an Error if the tools are not a list. */
export function fieldsOf(values) {
  const fields = {};
  for (const [name] of NUMBERS) {
    const value = values[name];
    if (value !== undefined && value !== "" && Number.isFinite(Number(value))) fields[name] = Number(value);
  }
  const stop = (values.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (values.reasoning_effort) fields.reasoning_effort = values.reasoning_effort;
  if (values.tools?.trim()) fields.tools = toolsOf(values.tools);
  return fields;
}

export function toolsOf(text) {
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch {
    // reported below
  }
  if (!Array.isArray(tools)) throw new Error("The tools in the settings are not a JSON list.");
  return tools;
}

export class Settings {
  /** `chat()` returns the open conversation. The dialog calls `changed()` when it closes. */
  constructor(store, chat, changed) {
    this.values = store.settings();
    this.dialog = find("settings");
    this.form = this.dialog.querySelector("form");
    const rows = NUMBERS.map(([name, min, max, step, help]) => this.row(name, { min, max, step }, help));
    const frequent = [...rows.slice(0, COMMON), ...rows.slice(-2)];
    find("common-settings").append(...frequent);
    find("more-settings").append(...rows.filter((row) => !frequent.includes(row)));
    this.form.elements.reasoning_effort.append(
      ...EFFORTS.map((effort) => element("option", { value: effort }, effort || "the server's default")),
    );
    this.form.addEventListener("submit", (event) => (event.preventDefault(), this.dialog.close()));
    this.form.addEventListener("reset", () => setTimeout(() => this.form.elements.system.setCustomValidity("")));
    this.form.elements.tools.addEventListener("input", (event) => this.checkTools(event.target));
    this.dialog.addEventListener("close", () => {
      const { system, ...values } = Object.fromEntries(new FormData(this.form));
      this.values = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));
      store.saveSettings(this.values);
      chat().system = system;
      changed();
    });
    this.chat = chat;
  }

  row(name, range, help) {
    const id = `set-${name}`;
    const input = element("input", { id, name, type: "number", inputMode: "decimal", ...range, "aria-describedby": `${id}-help` });
    return element(
      "div",
      { className: "setting" },
      element("label", { for: id }, name),
      input,
      element("small", { id: `${id}-help` }, help),
    );
  }

  checkTools(area) {
    try {
      if (area.value.trim()) toolsOf(area.value);
      area.setCustomValidity("");
    } catch (error) {
      area.setCustomValidity(error.message);
    }
  }

  open() {
    for (const input of this.form.elements) {
      if (input.name) input.value = input.name === "system" ? this.chat().system : (this.values[input.name] ?? "");
    }
    this.dialog.showModal();
  }

  showDefaults(params) {
    for (const [name] of NUMBERS) {
      const value = name === "max_tokens" ? params.n_predict : params[name];
      const isShown = typeof value === "number" && !(name === "max_tokens" && value < 0);
      this.form.elements[name].placeholder = isShown ? String(Number(value.toPrecision(4))) : "";
    }
  }

  fields() {
    return fieldsOf(this.values);
  }
}
