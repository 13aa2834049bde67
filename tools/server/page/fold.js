// Shows the beginning of a long message, and a button that shows the complete message.

import { button, element, number } from "./dom.js";

const MAX_LINES = 16;
const MAX_CHARACTERS = 1500;
const SLACK = 1.5; // A message that is only a little longer is not folded.

export function beginning(text) {
  const lines = text.split("\n", SLACK * MAX_LINES + 1);
  if (lines.length <= SLACK * MAX_LINES && text.length <= SLACK * MAX_CHARACTERS) return text;
  const start = lines.slice(0, MAX_LINES).join("\n").slice(0, MAX_CHARACTERS);
  const isCutInPair = /[\uD800-\uDBFF]$/.test(start);
  return (isCutInPair ? start.slice(0, -1) : start).trimEnd();
}

export function folded(tag, text) {
  const start = beginning(text);
  const shown = element(tag, { className: "plain" }, start === text ? text : `${start} …`);
  if (start === text) return [shown];
  const rest = `Show all ${number(text.match(/\S+/g)?.length ?? 0)} words`;
  const unfold = button(rest, () => {
    const isFolded = unfold.getAttribute("aria-expanded") === "false";
    shown.textContent = isFolded ? text : `${start} …`;
    unfold.textContent = isFolded ? "Show less" : rest;
    unfold.setAttribute("aria-expanded", String(isFolded));
  }, { className: "fold", "aria-expanded": "false" });
  return [shown, unfold];
}
