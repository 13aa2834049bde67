// Shows a conversation's messages. If a message changes, the elements of other messages do not change.

import { find } from "./dom.js";
import { MessageView } from "./message.js";
import { path, place } from "./tree.js";

const NEAR_PX = 80; // Within this distance from the end, the view scrolls with a growing answer.

export class Messages {
  /**
   * `actions` provides edit(node, text), again(node), turn(node, step), compare(node), remove(node) and
   * imageUrl(id).
   */
  constructor(actions) {
    this.actions = actions;
    this.log = find("messages");
    this.scroller = find("scroller");
    this.views = new Map(); // id -> MessageView
    this.conversation = null;
    this.follows = true;
    this.scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.follows && this.toEnd()).observe(this.log);
  }

  /** Show a conversation. `running` holds the ids of incomplete answers. */
  show(conversation, running) {
    if (conversation !== this.conversation) {
      this.views.clear();
      this.log.replaceChildren();
      this.conversation = conversation;
      this.follows = true;
    }
    const shown = path(conversation).map((node) => this.view(node, running.has(node.id)));
    const wanted = shown.map((view) => view.element);
    const kept = new Set(wanted);
    for (const one of [...this.log.children]) if (!kept.has(one)) one.remove();
    wanted.forEach((one, i) => {
      if (this.log.children[i] !== one) this.log.insertBefore(one, this.log.children[i] ?? null);
    });
    shown.forEach((view) => view.showPlace(place(conversation, view.node)));
    find("welcome").hidden = shown.length > 0;
    if (this.follows) this.toEnd();
    else this.scrolled();
  }

  view(node, isRunning) {
    let view = this.views.get(node.id);
    if (!view) this.views.set(node.id, (view = new MessageView(node, this.actions, isRunning)));
    return view;
  }

  update(node, isRunning, read = null) {
    this.views.get(node.id)?.update(isRunning, read);
  }

  focus(node) {
    this.views.get(node.id)?.element.focus();
  }

  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    find("to-end").hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
