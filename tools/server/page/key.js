import { find } from "./dom.js";

/** Ask the user for a key. Resolves to the key, or to null if the user cancelled. */
export function askKey(isWrong) {
  const dialog = find("key");
  const field = find("key-input");
  find("key-wrong").hidden = !isWrong;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue || null), { once: true });
  });
}

find("key").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  find("key").close(find("key-input").value.trim());
});
