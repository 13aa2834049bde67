"""The demo model's vocabulary: pieces as in SentencePiece, learned from stories."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from vkbackend.tools.demo.stories import tell_story

SPACE = "\u2581"
UNK, BOS, EOS = 0, 1, 2
N_SPECIAL = 3 + 256
# The first message begins a story, and the answer continues it.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ bos_token }}{{ m.content }}{% endif %}{% endfor %}"
)
N_VOCAB_MIN = N_SPECIAL + 64  # The stories use 56 characters.
# No piece spans two chunks, so encoding chunk by chunk yields SPM's tokens of the complete text.
CHUNK = re.compile(rf"{SPACE}?[A-Za-z]+|'[a-z]+|{SPACE}?\"|[.,!?]+\"?|{SPACE}|.", re.DOTALL)


class Vocabulary:
    """A vocabulary in SentencePiece's order: <unk> <s> </s>, 256 byte tokens, longer pieces, characters, and
    `marks` (a vision model's control tokens)."""

    def __init__(self, pieces: list[str], scores: list[float], marks: Sequence[str] = ()) -> None:
        self.pieces, self.scores = [*pieces, *marks], [*scores, *[0.0] * len(marks)]
        self.n_marks = len(marks)
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Prepend a space to the text and return its token ids, without <s> and </s>."""
        ids: list[int] = []
        for chunk in CHUNK.findall(SPACE + text.replace(" ", SPACE)):
            if chunk not in self._cache:
                self._cache[chunk] = self._encode_chunk(chunk)
            ids += self._cache[chunk]
        return ids

    def _encode_chunk(self, chunk: str) -> list[int]:
        """Merge the adjacent pair with the best score until no pair is a piece. The leftmost pair wins a
        tie."""
        symbols = list(chunk)
        while pairs := [
            (-self.scores[self._ids[a + b]], i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in self._ids
        ]:
            i = min(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids: list[int] = []
        for symbol in symbols:
            ids += [self._ids[symbol]] if symbol in self._ids else [3 + byte for byte in symbol.encode()]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text without the first space and without control tokens."""
        end = len(self.pieces) - self.n_marks
        raw = b"".join(
            bytes([i - 3]) if i < N_SPECIAL else self.pieces[i].encode() for i in ids if EOS < i < end
        )
        return raw.decode("utf-8", "replace").replace(SPACE, " ").removeprefix(" ")


def train_vocabulary(n_vocab: int, seed: int, n_stories: int = 6000) -> Vocabulary:
    rng = random.Random(seed)
    return learned_vocabulary(n_vocab, (tell_story(rng).text for _ in range(n_stories)))


def learned_vocabulary(n_vocab: int, texts: Iterable[str], marks: Sequence[str] = ()) -> Vocabulary:
    """Learn BPE merges on texts. The vocabulary has at most `n_vocab` tokens, and `marks` in addition. The
    rank of a merge becomes the score of its piece."""
    from tokenizers import Tokenizer, models, trainers

    chunks = (chunk for text in texts for chunk in CHUNK.findall(SPACE + text.replace(" ", SPACE)))
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - N_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(chunks, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    characters = [piece for piece, _ in learned if len(piece) == 1]
    merges = [piece for piece, _ in learned if len(piece) > 1]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * N_SPECIAL + [-float(rank) for rank in range(len(learned))]
    return Vocabulary(special + merges + characters, scores, marks)
