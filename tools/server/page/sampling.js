// The presets, and the sampling settings: names in the API, ranges and descriptions.

// [API's name, label, min, max, step, help]
export const NUMBERS = [
  ["temperature", "Freedom", 0, 10, 0.05, "0 takes the likeliest token; more is freer"],
  ["top_k", "Number of choices", 0, 1000, 1, "only the k likeliest tokens; 0: all"],
  ["top_p", "Likely choices", 0, 1, 0.01, "only the likeliest tokens with this total probability"],
  ["min_p", "No unlikely choices", 0, 1, 0.01, "only tokens with at least this share of the top probability"],
  ["typical_p", "Typical choices", 0, 1, 0.01, "only tokens of typical surprise; 1: off"],
  ["top_n_sigma", "Near the best", -1, 10, 0.1, "only tokens within n standard deviations of the best; -1: off"],
  ["xtc_probability", "Avoid the obvious", 0, 1, 0.01, "chance to drop the likeliest tokens"],
  ["xtc_threshold", "Obvious from", 0, 1, 0.01, "applies to tokens above this probability"],
  ["dynatemp_range", "Changing freedom", 0, 10, 0.05, "temperature varies with entropy by up to this"],
  ["dynatemp_exponent", "Curve of the change", 0, 10, 0.1, "exponent of that entropy"],
  ["repeat_penalty", "Fewer repetitions", 0, 10, 0.05, "penalty for tokens used before; 1: off"],
  ["repeat_last_n", "Repetitions since", -1, 1000000, 1, "tokens to look back; 0: off, -1: all"],
  ["presence_penalty", "New topics", -10, 10, 0.1, "penalty for any token used before"],
  ["frequency_penalty", "New words", -10, 10, 0.1, "penalty for each earlier use"],
  ["dry_multiplier", "No repeated phrases", 0, 10, 0.1, "penalty for repeated phrases; 0: off"],
  ["dry_base", "Growth for phrases", 0, 10, 0.05, "growth of the penalty with the phrase's length"],
  ["dry_allowed_length", "Allowed phrases", 0, 1000, 1, "only phrases of at least this length"],
  ["mirostat", "Constant surprise", 0, 2, 1, "keeps surprise constant; 0: off"],
  ["mirostat_tau", "Target surprise", 0, 100, 0.1, "the surprise that Mirostat keeps"],
  ["mirostat_eta", "Speed of the change", 0, 10, 0.01, "Mirostat's learning rate"],
  ["seed", "Same answer again", -1, 4294967295, 1, "same seed, same answer; -1: random"],
  ["max_tokens", "Longest answer", 1, 1000000, 1, "in tokens; a token is about three quarters of a word"],
];

// [id, label, help, values]
export const PRESETS = [
  ["default", "Default", "as the server was started", {}],
  ["precise", "Precise", "for facts, code and summaries", { temperature: 0.2, top_k: 40, top_p: 0.9, min_p: 0.05 }],
  ["balanced", "Balanced", "for most conversations", { temperature: 0.7, top_k: 40, top_p: 0.95, min_p: 0.05 }],
  ["creative", "Creative", "for stories and ideas", { temperature: 1.1, top_k: 0, top_p: 1, min_p: 0.05 }],
];
const CHANGED = [...new Set(PRESETS.flatMap(([, , , values]) => Object.keys(values)))];

/** Return the settings with the values of a preset, and without the values of other presets. */
export function withPreset(values, id) {
  const chosen = PRESETS.find((preset) => preset[0] === id)[3];
  const others = Object.entries(values).filter(([name]) => !CHANGED.includes(name));
  const texts = Object.entries(chosen).map(([name, value]) => [name, String(value)]);
  return Object.fromEntries([...others, ...texts]);
}

/** Return the id of the preset that the settings equal, or "" if they differ from all. */
export function presetOf(values) {
  const isSame = (chosen) =>
    CHANGED.every((name) => {
      const value = values[name] ?? "";
      return value === "" ? chosen[name] === undefined : Number(value) === chosen[name];
    });
  return PRESETS.find(([, , , chosen]) => isSame(chosen))?.[0] ?? "";
}
