// The dialog of settings. Fields of requests have the API's names; empty fields are not sent.

import { element, find } from "./dom.js";
import { NUMBERS, PRESETS, presetOf, withPreset } from "./sampling.js";

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
    const rows = NUMBERS.map(([name, label, min, max, step, help]) => this.row(name, label, { min, max, step }, help));
    const frequent = [...rows.slice(0, COMMON), ...rows.slice(-2)];
    find("common-settings").append(...frequent);
    find("more-settings").append(...rows.filter((row) => !frequent.includes(row)));
    find("presets").append(...PRESETS.map(([preset, label, help]) => this.presetRow(preset, label, help)));
    this.form.elements.reasoning_effort.append(
      ...EFFORTS.map((effort) => element("option", { value: effort }, effort || "the server's default")),
    );
    this.form.addEventListener("submit", (event) => (event.preventDefault(), this.dialog.close()));
    this.form.addEventListener("reset", () => setTimeout(() => (this.showPreset(), this.checkTools(this.form.elements.tools))));
    this.form.addEventListener("input", (event) => event.target.name === "preset" || this.showPreset());
    this.form.elements.tools.addEventListener("input", (event) => this.checkTools(event.target));
    this.dialog.addEventListener("close", () => {
      const { system, preset, titles, ...values } = Object.fromEntries(new FormData(this.form));
      if (!titles) values.titles = "off";
      this.values = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));
      store.saveSettings(this.values);
      chat().system = system;
      changed();
    });
    this.chat = chat;
  }

  row(name, label, range, help) {
    const id = `set-${name}`;
    const input = element("input", { id, name, type: "number", inputMode: "decimal", ...range, "aria-describedby": `${id}-help` });
    return element(
      "div",
      { className: "setting" },
      element("label", { for: id }, label, " ", element("code", {}, name)),
      input,
      element("small", { id: `${id}-help` }, help),
    );
  }

  presetRow(preset, label, help) {
    const id = `preset-${preset}`;
    const input = element("input", { id, type: "radio", name: "preset", value: preset, "aria-describedby": `${id}-help` });
    input.addEventListener("change", () => this.usePreset(preset));
    return element(
      "label",
      { for: id, className: "preset" },
      input,
      element("span", {}, label, element("small", { id: `${id}-help` }, help)),
    );
  }

  /** Write the values of a preset into the fields, where the user sees them and can change them. */
  usePreset(preset) {
    const values = withPreset(this.formValues(), preset);
    for (const [name] of NUMBERS) this.form.elements[name].value = values[name] ?? "";
  }

  showPreset() {
    const preset = presetOf(this.formValues());
    for (const input of this.form.elements.preset) input.checked = input.value === preset;
  }

  formValues() {
    return Object.fromEntries(NUMBERS.map(([name]) => [name, this.form.elements[name].value]));
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
      const isText = input.name && !["radio", "checkbox"].includes(input.type);
      if (isText) input.value = input.name === "system" ? this.chat().system : (this.values[input.name] ?? "");
    }
    this.form.elements.titles.checked = this.writesTitles();
    this.showPreset();
    this.dialog.showModal();
  }

  writesTitles() {
    return this.values.titles !== "off";
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
