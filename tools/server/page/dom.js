// Functions for elements. Texts become text nodes, so a model's output is never parsed as HTML.

/**
 * Create an element. `data-*` and `aria-*` become attributes, `on*` become listeners, and all others become
 * properties. Children are nodes, strings and lists of them.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  return appended(made, children);
}

/** Append nodes and strings one by one, because the number of arguments of a call is limited. */
export function appended(parent, children) {
  for (const child of children.flat(Infinity)) parent.append(child);
  return parent;
}

export function button(text, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, text);
}

export const find = (id) => document.getElementById(id);

/** Announce a text to screen readers, even if it is a repetition. */
export function announce(text) {
  const said = element("p", {}, text);
  const log = find("announcements");
  log.append(said);
  while (log.childElementCount > 20) log.firstChild.remove();
}

/** Copy a text. `clipboard` requires https; without https, a selection is copied. */
export async function copy(text, source) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
  } catch {
    copySelected(text);
  }
  const before = source.textContent;
  source.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (source.textContent = before), 1500);
}

function copySelected(text) {
  const area = element("textarea", { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  const unit = n > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(n) / 10)) : 0;
  const value = n / 1024 ** unit;
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${UNITS[unit]}`;
}

/** Format numbers below 20 with two significant digits, and others as integers: 0.53, 7.1, 42, 1,234. */
export function number(value) {
  const digits = value >= 20 || Number.isInteger(value) ? 0 : value >= 1 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}
