// Shows all versions of an answer, or of a question with its answer, next to each other.

import { button, element, find } from "./dom.js";
import { folded } from "./fold.js";
import { markdown } from "./render.js";
import { answerBelow, versions } from "./tree.js";

/** Open the dialog. `choose(step)` shows the version that is `step` positions away in the conversation. */
export function compare(conversation, node, choose) {
  const dialog = find("versions");
  const all = versions(conversation, node);
  const current = all.indexOf(node);
  const columns = all.map((version, i) => {
    const isCurrent = i === current;
    const use = () => (dialog.close(), choose(i - current));
    const question = version.role === "user" ? element("div", { className: "question" }, ...folded("p", version.content)) : "";
    const answer = version.role === "user" ? answerBelow(conversation, version) : version;
    return element(
      "section",
      { "aria-label": `Version ${i + 1}`, "aria-current": isCurrent ? "true" : null },
      element(
        "div",
        { className: "row" },
        element("h3", { className: "grow" }, `Version ${i + 1}`),
        button(isCurrent ? "Shown" : "Use this", use, { className: isCurrent ? "" : "primary", disabled: isCurrent, "aria-label": `Use version ${i + 1}` }),
      ),
      question,
      element("div", { className: "body", tabIndex: 0, role: "region", "aria-label": `Text of version ${i + 1}` }, markdown(answer?.content ?? "")),
      element("p", { className: "error" }, answer?.error ?? ""),
      element("p", { className: "quiet" }, answer?.stopped ? "Stopped" : ""),
    );
  });
  find("version-list").replaceChildren(...columns);
  dialog.showModal();
}
