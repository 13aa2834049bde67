// A live view of devices: memory by purpose, share of the weights, reduce time.

import { bytes, element, find, number } from "./dom.js";

const POLL_MS = 2000; // if visible
const PURPOSES = ["weights", "mapped", "kv", "scratch", "host", "shared", "staging"];
const NAMES = { mapped: "mapped file", kv: "KV cache", host: "in host memory" };

export class Devices {
  /** `path()` returns the address of the chosen model's counters. */
  constructor(api, path = () => "stats") {
    this.api = api;
    this.path = path;
    this.panel = find("devices");
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  toggle() {
    this.panel.hidden = !this.panel.hidden;
    find("toggle-devices").setAttribute("aria-expanded", String(!this.panel.hidden));
    if (!this.panel.hidden) find("close-devices").focus();
    else find("toggle-devices").focus();
    this.restart();
  }

  restart() {
    clearTimeout(this.timer);
    if (!this.panel.hidden && !document.hidden) this.poll();
  }

  async poll() {
    const told = find("devices-error");
    clearTimeout(this.timer);
    try {
      this.show(await this.api.json(this.path()));
      told.textContent = "";
    } catch (error) {
      told.textContent = error.message;
      if (error.status === 401) return; // ask only once
    }
    if (!this.panel.hidden && !document.hidden) this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  show({ devices, engine }) {
    const weights = devices.map((device) => (device.weights ?? 0) + (device.mapped ?? 0) + (device.host ?? 0));
    const all = weights.reduce((sum, n) => sum + n, 0);
    find("device-list").replaceChildren(
      ...devices.map((device, i) => deviceElement(device, i, all ? weights[i] / all : 0)),
    );
    const sharing = devices.filter(({ name }) => !name.endsWith("(projector)"));
    find("engine").replaceChildren(...engineRows(engine, sharing.length));
  }
}

function deviceElement(device, index, share) {
  const used = PURPOSES.reduce((sum, name) => sum + (device[name] ?? 0), 0);
  const percent = `${Math.round(100 * share)} % of the weights`;
  const parts = PURPOSES.filter((name) => device[name] > 0).map((name) =>
    element("tr", {}, element("th", { scope: "row" }, NAMES[name] ?? name), element("td", {}, bytes(device[name]))),
  );
  const free = device.free == null ? [] : [element("tr", { className: "free" }, element("th", { scope: "row" }, "free"), element("td", {}, bytes(device.free)))];
  const label = `Device ${index} has ${percent}`;
  return element(
    "section",
    { className: "device", "aria-label": `Device ${index}` },
    element("h3", {}, `${index} · ${device.name}`),
    element("div", { className: "share" }, element("meter", { max: 1, value: share, "aria-label": label }), element("span", {}, percent)),
    element("table", {}, element("tbody", {}, ...parts, element("tr", { className: "sum" }, element("th", { scope: "row" }, "used"), element("td", {}, bytes(used))), ...free)),
  );
}

function engineRows(engine, nDevices) {
  const cells = engine.cells ? ` (${number((100 * (engine.cells_used ?? 0)) / engine.cells)} %)` : "";
  const rows = [
    ["running", `${number(engine.n_running ?? 0)} of ${number(engine.n_slots ?? 0)}`],
    ["waiting", number(engine.n_waiting ?? 0)],
    ["cache in use", `${number(engine.cells_used ?? 0)} of ${number(engine.cells ?? 0)}${cells}`],
    ["cached prefixes", number(engine.cells_cached ?? 0)],
    ["step, median", `${number(engine.step_ms_p50 ?? 0)} ms`],
    ["step, 99th percentile", `${number(engine.step_ms_p99 ?? 0)} ms`],
  ];
  if (engine.n_drafted) {
    rows.push(["tokens per step", number(engine.tokens_per_step)]);
    rows.push(["drafted tokens accepted", `${number((100 * engine.n_accepted) / engine.n_drafted)} %`]);
  }
  const reduce = engine.reduce_us;
  const cost = nDevices < 2 ? "one device: none" : reduce ? `${number(reduce)} µs` : "none yet";
  rows.push(["per reduce", cost]);
  return rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}
