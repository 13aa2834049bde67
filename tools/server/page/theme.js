import { announce, find } from "./dom.js";

const KEY = "vkbackend.theme";
const THEMES = ["system", "light", "dark"];

export function showTheme(theme = localStorage.getItem(KEY)) {
  const shown = THEMES.includes(theme) ? theme : THEMES[0];
  document.documentElement.dataset.theme = shown;
  find("theme").textContent = `Theme: ${shown}`;
}

export function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem(KEY, theme);
  showTheme(theme);
  announce(`Theme: ${theme}`);
}
