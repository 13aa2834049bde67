"""Text to token ids and back, from the vocabulary a GGUF file carries.

SPM (`tokenizer.ggml.model` "llama") merges by score (spm.py); BPE ("gpt2", over a pre-tokenizer of
pre_tokenizers.py, and Gemma 4's "gemma4", over characters) runs in the `tokenizers` library. Decoding is ours
and incremental. Knows no model, no network.
"""

import codecs
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.pre_tokenizers import PRE_TOKENIZERS
from vkbackend.models.text.special_tokens import MAX_LENGTH, SpecialTokens
from vkbackend.models.text.spm import SPACE, SpmMerger
from vkbackend.models.text.token_roles import MARKERS, WHITE_SPACE, TokenType, settle_roles, stripping

MAX_TEXT = 1 << 22  # characters; the regular expression engine gives up, untidily, at 10,000,000 steps back
_BYTE_TEXT = re.compile(r"<0x([0-9A-F]{2})>")
_LINES = re.compile(r"[^\n]+|\n+")
_KINDS = {"llama": "SPM", "gpt2": "BPE", "gemma4": "BPE of Gemma 4"}  # tokenizer.ggml.model


def _byte_characters() -> dict[str, int]:
    """Character -> byte in byte-level BPE: printable Latin-1 is itself, the rest lies from U+0100 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


class Tokenizer:
    """A vocabulary with its rules. `stop_ids` are the tokens that end a generation; `bos_id` may be None."""

    def __init__(self, gguf: GGUF) -> None:
        path, model = gguf.paths[0], gguf.string("tokenizer.ggml.model", None)
        if model not in _KINDS:
            found = "it has none" if model in (None, "none", "no_vocab") else f"it is of kind {model!r}"
            known = ", ".join(f"{name!r} ({kind})" for name, kind in _KINDS.items())
            raise UnsupportedModel(f"{path}: no usable tokenizer: {found}; known are {known}: give token ids")
        self._path, self._spaced = path, model != "gpt2"  # tokens with spaces as U+2581, and bytes
        self._tokens = gguf.strings("tokenizer.ggml.tokens")
        self.n_vocab = len(self._tokens)
        self._ids = {text: i for i, text in enumerate(self._tokens) if text}
        if len(self._ids) < self.n_vocab - self._tokens.count(""):
            twice = next(text for i, text in enumerate(self._tokens) if text and self._ids[text] != i)
            raise GGUFError(f"{path}: 'tokenizer.ggml.tokens' holds {twice!r} twice")
        self._types = self._read_types(gguf)

        default_bos, default_eos = (1, 2) if model == "llama" else (None, None)
        self.bos_id = self._special_id(gguf, "bos", default_bos)
        self.eos_id = self._special_id(gguf, "eos", default_eos)
        defaults = {"eos": default_eos}
        self.stop_ids = settle_roles(
            self._ids, self._types, lambda name: self._special_id(gguf, name, defaults.get(name))
        )
        self._stripping = stripping(gguf.string("general.name", ""), self._ids, self._types)
        build = {"llama": self._build_spm, "gpt2": self._build_bpe, "gemma4": self._build_gemma4}[model]
        self._encode_text = build(gguf)
        for name, given, token_id in (("bos", self.add_bos, self.bos_id), ("eos", self.add_eos, self.eos_id)):
            if given and token_id is None:
                raise GGUFError(
                    f"{path}: a {name} token is to be added, but 'tokenizer.ggml.{name}_token_id' is missing"
                )

        special = [(t, i) for t, i in self._ids.items() if self._types[i] in MARKERS]
        for text, i in special:
            if len(text) > MAX_LENGTH:
                raise GGUFError(
                    f"{path}: special token {i} has {len(text)} characters, at most {MAX_LENGTH} are accepted"
                )
        self._special = SpecialTokens(special)
        self._user_defined = SpecialTokens(
            (t, i) for t, i in special if self._types[i] == TokenType.USER_DEFINED
        )
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> "Tokenizer":
        """Raises UnsupportedModel (none, or one of another kind), GGUFError (malformed vocabulary)."""
        return cls(gguf)

    # ---- reading the vocabulary ----

    def _read_types(self, gguf: GGUF) -> list[int]:
        types = gguf.ints("tokenizer.ggml.token_type", None)
        if types is None:
            return [TokenType.NORMAL] * self.n_vocab
        self._check_length("token_type", len(types))
        out: list[int] = types.tolist()
        for i, kind in enumerate(out):
            if kind == TokenType.BYTE and not _BYTE_TEXT.fullmatch(self._tokens[i]):
                raise GGUFError(
                    f"{self._path}: byte token {i} is {self._tokens[i]!r}, expected '<0x00>'..'<0xFF>'"
                )
        return out

    def _check_length(self, name: str, length: int) -> None:
        if length != self.n_vocab:
            raise GGUFError(
                f"{self._path}: 'tokenizer.ggml.{name}' has {length} entries for {self.n_vocab} tokens"
            )

    def _special_id(self, gguf: GGUF, name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = gguf.u32(key, None)
        if value is None:
            return default if default is not None and default < self.n_vocab else None
        if value >= self.n_vocab:
            raise GGUFError(f"{self._path}: {key!r} is {value}, the vocabulary has {self.n_vocab} tokens")
        return value

    def _read_flags(self, gguf: GGUF, *, add_bos: bool, space_prefix: bool) -> None:
        self.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token", add_bos)
        self.add_eos = gguf.boolean("tokenizer.ggml.add_eos_token", False)
        self.add_space_prefix = space_prefix and gguf.boolean("tokenizer.ggml.add_space_prefix", True)

    def _build_spm(self, gguf: GGUF) -> Callable[[str], list[int]]:
        self._read_flags(gguf, add_bos=True, space_prefix=True)
        scores = gguf.floats("tokenizer.ggml.scores").tolist()
        self._check_length("scores", len(scores))
        if any(map(math.isnan, scores)):
            raise GGUFError(f"{self._path}: 'tokenizer.ggml.scores' holds NaN")
        merger = SpmMerger(self._ids, scores, self._byte_ids(self._special_id(gguf, "unknown", 0)))
        return lambda text: merger.encode(text.replace(" ", SPACE))

    def _byte_ids(self, unknown: int | None) -> list[int]:
        """What stands for each byte of a character that is no token."""
        byte_ids = [self._ids.get(f"<0x{b:02X}>", unknown) for b in range(256)]
        known = [i for i in byte_ids if i is not None]
        if len(known) < 256:
            raise GGUFError(f"{self._path}: the vocabulary has neither all byte tokens nor an unknown token")
        return known

    def _build_gemma4(self, gguf: GGUF) -> Callable[[str], list[int]]:
        """Lines are not cut into words, and a run of line feeds that is a token is taken whole."""
        self._read_flags(gguf, add_bos=True, space_prefix=False)
        self.add_bos = self.bos_id is not None  # whatever the file says: the first ones got it wrong
        unknown = self._special_id(gguf, "unknown")
        self._byte_ids(unknown)
        backend = Backend(
            BPE(
                vocab=self._ids,
                merges=self._read_merges(gguf),
                byte_fallback=True,
                unk_token=None if unknown is None else self._tokens[unknown],
            )
        )

        def encode(text: str) -> list[int]:
            out: list[int] = []
            for line in _LINES.findall(text.replace(" ", SPACE)):
                whole = self._ids.get(line) if line[0] == "\n" else None
                out += (whole,) if whole is not None else backend.encode(line, add_special_tokens=False).ids
            return out

        return encode

    def _build_bpe(self, gguf: GGUF) -> Callable[[str], list[int]]:
        name = gguf.string("tokenizer.ggml.pre", "default")
        if (pre := PRE_TOKENIZERS.get(name)) is None:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise UnsupportedModel(
                f"{self._path}: pre-tokenizer {name!r} is not known; known are {known}: give token ids"
            )
        self._read_flags(gguf, add_bos=pre.add_bos, space_prefix=False)
        merges = self._read_merges(gguf)
        backend = Backend(BPE(vocab=self._ids, merges=merges, ignore_merges=pre.ignore_merges))
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    def _read_merges(self, gguf: GGUF) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for merge in dict.fromkeys(gguf.strings("tokenizer.ggml.merges")):
            left, _, right = merge.partition(" ")
            if left not in self._ids or right not in self._ids or left + right not in self._ids:
                raise GGUFError(f"{self._path}: merge {merge!r} does not join two tokens into a third one")
            merges.append((left, right))
        return merges

    # ---- text to ids ----

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        plain: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Ids of a text; `add_special`: with BOS and EOS where the model wants them.

        User-defined tokens are always taken from the text, control tokens only with `parse_special`, none in
        the stretches `plain`, which are in order. Lone surrogates become U+FFFD. Raises InvalidArgument (no
        str, longer than MAX_TEXT).
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"the text is a {type(text).__name__}, expected a str")
        if len(text) > MAX_TEXT:
            raise InvalidArgument(
                f"the text has {len(text)} characters, at most {MAX_TEXT} are taken at once"
            )
        text = whole_characters(text)
        out: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            out.append(self.bos_id)
        prefix = self.add_space_prefix  # a text that follows a special token begins with a space again
        strip = False
        for fragment in self._fragments(text, parse_special, plain):
            if isinstance(fragment, int):
                out.append(fragment)
                prefix, strip = self.add_space_prefix, fragment in self._stripping
            elif fragment := fragment.lstrip(WHITE_SPACE) if strip else fragment:
                out += self._encode_text(" " + fragment if prefix else fragment)
                prefix = strip = False
        if add_special and self.add_eos and self.eos_id is not None:
            out.append(self.eos_id)
        return out

    def _fragments(self, text: str, parse_special: bool, plain: Sequence[tuple[int, int]]) -> list[str | int]:
        special = self._special if parse_special else self._user_defined
        out: list[str | int] = []
        done = 0
        for begin, end in (*plain, (len(text), len(text))):
            for fragment in (*special.cut(text[done:begin]), text[begin:end]):
                if isinstance(fragment, str) and out and isinstance(before := out[-1], str):
                    out[-1] = before + fragment  # merged as one text
                elif fragment != "":
                    out.append(fragment)
            done = end
        return out

    def markers(self, wanted: Callable[[str], bool]) -> list[tuple[str, int]]:
        """Control and unknown tokens, and those user-defined ones whose texts are `wanted`."""
        found = ((text, i) for text, i in self._ids.items() if self.is_marker(i))
        return [(text, i) for text, i in found if self.is_special(i) or wanted(text)]

    # ---- ids to text ----

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, at_start: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. InvalidArgument for an id out of range.

        `at_start`: the ids begin a text, so the space that `encode` put before it is taken off again; False
        for ids that continue a text, such as generated ones.
        """
        stream = self.stream(skip_special, at_start=at_start)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, *, at_start: bool = True) -> "TextStream":
        """Incremental `decode`: the pushed parts and the flush, joined, are what `decode` returns."""
        return TextStream(self, skip_special, at_start)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out: control and unknown tokens."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def is_marker(self, token_id: int) -> bool:
        """Whether it is taken from a text before anything is merged, whatever stands beside it."""
        return self._types[token_id] in MARKERS

    def piece(self, token_id: int) -> bytes:
        """The bytes a token stands for; they need not be whole characters."""
        try:
            index = operator.index(token_id)
        except TypeError:
            raise InvalidArgument(
                f"token id {token_id!r} is a {type(token_id).__name__}, expected an int"
            ) from None
        if (found := self._pieces.get(index)) is not None:
            return found
        if not 0 <= index < self.n_vocab:
            raise InvalidArgument(
                f"token id {index} is out of range: the vocabulary has {self.n_vocab} tokens"
            )
        return self._pieces.setdefault(index, self._make_piece(self._tokens[index], self._types[index]))

    def _make_piece(self, text: str, kind: int) -> bytes:
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode()
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != TokenType.NORMAL:
            return b""
        if self._spaced:
            return text.replace(SPACE, " ").encode()
        # A character outside the byte alphabet stands for itself: some vocabularies add such normal tokens.
        return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in text)


def whole_characters(text: str) -> str:
    """Halves of surrogate pairs joined, lone ones as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextStream:
    """Turns ids into text as they come; holds back bytes that do not make a whole character yet."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, at_start: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._strip_space = at_start and tokenizer.add_space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes, maybe empty. InvalidArgument for an id out of range."""
        piece = self._tokenizer.piece(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if piece and self._strip_space:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What was held back, as U+FFFD; the stream may go on after it."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def chat_templates(gguf: GGUF) -> dict[str, str]:
    """All chat templates of the file by their names; the unnamed one is "default"."""
    found = {}
    for key in gguf.metadata:
        name = key.removeprefix("tokenizer.chat_template")
        if name != key and (name == "" or name[0] == "."):
            with suppress(GGUFError):
                found[name[1:] or "default"] = gguf.string(key)
    return found


def end_ids(gguf: GGUF) -> frozenset[int]:
    """The end-of-sequence token of a file whose tokenizer cannot be used, if it names one."""
    with suppress(GGUFError):
        eos = gguf.u32("tokenizer.ggml.eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos])
    return frozenset()
