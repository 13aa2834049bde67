import { button, download, element, find } from "./dom.js";

export class Sidebar {
  /** `actions` provides open(id), remove(id), renamed(chat) and tell(text). */
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.list = find("chats");
    this.search = find("search");
    this.current = null;
    this.search.addEventListener("input", () => this.show());
    find("export").addEventListener("click", () => this.export());
    find("import").addEventListener("click", () => find("import-file").click());
    find("import-file").addEventListener("change", (event) => this.import(event.target));
  }

  show(current = this.current) {
    this.current = current;
    const found = this.store.list(this.search.value);
    this.list.replaceChildren(...found.map((chat) => this.row(chat)));
    find("no-chats").hidden = found.length > 0;
    find("no-chats").textContent = this.search.value ? "No matches." : "No conversations yet.";
  }

  row(chat) {
    const title = chat.title || "New conversation";
    const isCurrent = chat.id === this.current ? "page" : null;
    return element(
      "li",
      {},
      button(title, () => this.actions.open(chat.id), { className: "chat", title, "aria-current": isCurrent }),
      button("✎", (event) => this.rename(chat, event.target.closest("li")), { className: "small", "aria-label": `Rename ${title}` }),
      button("×", () => this.remove(chat, title), { className: "small", "aria-label": `Delete ${title}` }),
    );
  }

  rename(chat, row) {
    const input = element("input", { value: chat.title, "aria-label": "Title", maxLength: 200 });
    let isDone = false; // Removing the field also blurs it.
    const done = (isKept) => {
      if (isDone) return;
      isDone = true;
      if (isKept && input.value.trim()) chat.title = input.value.trim();
      if (isKept) this.actions.renamed(chat);
      this.show();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) done(true);
      if (event.key === "Escape") done(false);
    });
    input.addEventListener("blur", () => done(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  remove(chat, title) {
    if (confirm(`Delete “${title}”? This cannot be undone.`)) this.actions.remove(chat.id);
  }

  export() {
    const day = new Date().toISOString().slice(0, 10);
    download(`conversations-${day}.json`, this.store.export());
  }

  async import(input) {
    const [file] = input.files;
    if (!file) return;
    try {
      const found = this.store.import(await file.text());
      this.actions.tell(`Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`);
    } catch (error) {
      this.actions.tell(error.message);
    }
    input.value = "";
    this.show();
  }
}
