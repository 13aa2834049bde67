"""The page's modules run without a browser: tree, store, events, settings."""

from __future__ import annotations

from typing import Any

import pytest
from javascript import Run

pytestmark = pytest.mark.no_vulkan


def test_tree_of_messages(run: Run) -> None:
    results = run(
        "tree.js",
        """(m) => {
            const chat = m.newConversation();
            const texts = () => m.path(chat).map((node) => node.content).join(" ");
            const said = [];
            const question = m.add(chat, m.ROOT, "user", "q1");
            const answer = m.add(chat, question.id, "assistant", "a1");
            m.add(chat, question.id, "assistant", "a2");
            said.push(texts());
            m.turn(chat, m.path(chat)[1], -1);
            m.add(chat, answer.id, "user", "q2");
            said.push(texts());
            m.add(chat, m.ROOT, "user", "other");
            said.push(texts(), m.place(chat, m.path(chat)[0]).join("/"));
            m.turn(chat, m.path(chat)[0], -1);
            said.push(texts());
            const copy = m.checked(JSON.parse(JSON.stringify(chat)));
            said.push(m.path(copy).map((node) => node.content).join(" "));
            m.remove(chat, question);
            said.push(texts(), Object.keys(chat.nodes).length);
            return said;
        }""",
    )
    assert results == ["q1 a2", "q1 a1 q2", "other", "1/2", "q1 a1 q2", "q1 a1 q2", "other", 2]


STORAGE = """
    class Storage {
        entries = new Map();
        get length() { return this.entries.size; }
        key(i) { return [...this.entries.keys()][i]; }
        getItem(key) { return this.entries.get(key) ?? null; }
        setItem(key, value) {
            if (this.full) throw new Error("QuotaExceededError");
            this.entries.set(key, value);
        }
        removeItem(key) { this.entries.delete(key); }
    }
"""


def test_store(run: Run) -> None:
    results = run(
        "store.js",
        """async (m) => {"""
        + STORAGE
        + """
            const storage = new Storage(), store = new m.Store(storage);
            const A = "a".repeat(24), B = "b".repeat(24);
            const root = (...children) => ({ "": { children, chosen: 0, role: "root", content: "" } });
            const one = { role: "user", content: "Blue Whales", children: [], chosen: 0 };
            const file = JSON.stringify({ kind: "vkbackend-conversations", version: 1, conversations: [
                { id: A, title: "sea", system: "", updated: 1, nodes: { ...root("x"), x: one } },
                { id: B, title: "sky", system: "", updated: 2, nodes: root() },
            ] });
            const titles = (words) => store.list(words).map((chat) => chat.title).join();
            store.import(file);
            const again = store.import(file).map((chat) => chat.id.length);
            const said = [titles(), titles("whales BLUE"), titles("whales red"), again.join()];
            said.push(new m.Store(storage).export() === store.export());
            const exported = JSON.parse(store.export());
            store.delete(B);
            said.push(exported.conversations.length, store.list().length, storage.length);
            storage.full = true;
            const save = () => store.save(store.list()[0]);
            for (const act of [save, () => store.import("no"), () => store.import("{}")]) {
                try { act(); said.push("kept"); } catch (error) { said.push(error.message); }
            }
            return said;
        }""",
    )
    titles, found_titles, none, ids, is_same, n_exported, n, n_stored, *errors = results
    assert titles == "sky,sky,sea,sea" and found_titles == "sea,sea" and none == "" and ids == "24,24"
    assert is_same and (n_exported, n, n_stored) == (4, 3, 3)
    assert "storage is full" in errors[0] and "not JSON" in errors[1] and "not an export" in errors[2]


def node(*children: str) -> dict[str, Any]:
    return {"children": list(children), "role": "user", "content": "a"}


BAD_CHATS: list[Any] = [
    None,
    1,
    {},
    {"nodes": {}},
    {"nodes": {"": {"children": "x"}}},
    {"nodes": {"": node("a")}},
    {"nodes": {"": node("a", "a"), "a": node()}},
    {"nodes": {"": node("a"), "a": node("a")}},
    {"nodes": {"": node("a"), "a": node() | {"role": "system"}}},
    {"nodes": {"": node("a"), "a": node() | {"content": {}}}},
    {"nodes": {"": node("constructor")}},
    {"id": 1, "title": "", "system": "", "nodes": {"": node()}},
]


def test_a_wrong_conversation_is_refused(run: Run) -> None:
    """Conversations with loops, or with ids such as "constructor", are refused too."""
    function = """(m, chats) => chats.map((chat) => {
        try { m.checked(chat); return "taken"; } catch (error) { return error.message; }
    })"""
    for chat, message in zip(BAD_CHATS, run("tree.js", function, BAD_CHATS), strict=True):
        assert message.startswith("not a conversation of this page"), (chat, message)


def test_events_in_any_pieces(run: Run) -> None:
    function = "(m, pieces) => { const e = new m.EventLines(); return pieces.flatMap((p) => e.push(p)); }"
    whole = ': ping\n\ndata: {"a":1}\r\n\r\nevent: x\ndata: b: c\n\ndata: [DONE]\n\n'
    for size in (1, 2, 7, len(whole)):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert run("api.js", function, pieces) == ['{"a":1}', "b: c", "[DONE]"]


def test_fields_of_settings(run: Run) -> None:
    values = {"temperature": "0.5", "top_k": "", "seed": "7", "stop": "a\n\nb c", "tools": " ", "other": "1"}
    fields = run("settings.js", "(m, values) => m.fieldsOf(values)", values)
    assert fields == {"temperature": 0.5, "seed": 7, "stop": ["a", "b c"]}


def test_messages_of_a_request(run: Run) -> None:
    """A stopped answer without text is omitted, and its question is joined with the next question."""
    texts = [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c"), ("user", "d")]
    nodes = {
        str(i): {"id": str(i), "parent": str(i - 1) if i else "", "role": role, "content": content}
        for i, (role, content) in enumerate(texts)
    }
    chat = {"system": "s", "nodes": nodes | {"": {"id": ""}}}
    messages = run("chat.js", "async (m, chat) => (await m.requestOf(chat, '4')).messages", chat)
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "s"), ("user", "a\n\nb"), ("assistant", "c"), ("user", "d"),
    ]  # fmt: skip


def test_images_of_a_request(run: Run) -> None:
    """Images precede the text. An image that the browser no longer has is left out."""
    nodes = {
        "": {"id": ""},
        "0": {"id": "0", "parent": "", "role": "user", "content": "a", "images": ["i", "gone"]},
        "1": {"id": "1", "parent": "0", "role": "assistant", "content": ""},
        "2": {"id": "2", "parent": "1", "role": "user", "content": "b"},
        "3": {"id": "3", "parent": "2", "role": "user", "content": "", "images": ["i"]},
    }
    function = """async (m, chat) => {
        const images = {get: async (id) => (id === "i" ? new Blob(["abc"], {type: "image/webp"}) : null)};
        return (await m.requestOf(chat, '3', images)).messages;
    }"""
    (message,) = run("chat.js", function, {"system": "", "nodes": nodes})
    image = {"type": "image_url", "image_url": {"url": "data:image/webp;base64,YWJj"}}
    texts = [{"type": "text", "text": text} for text in "ab"]
    assert message == {"role": "user", "content": [image, *texts, image]}
