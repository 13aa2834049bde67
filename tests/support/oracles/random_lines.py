"""Random lines on which tokenizers differ: scripts, digits, spaces, code, apostrophes."""

from __future__ import annotations

import random

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz" * 2, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789" * 2, "      \n\r\t",
    "'\".,:;!?-_/\\()[]{}<>@#$%^&*+=|~`", "éèüñßçàÉÜ", "абвгдеАБВГ", "αβγΔΩ", "日本語漢字中文",
    "ひらがなカタカナ", "한국어ㄱㅎ", "العربية٠١٢٣", "हिन्दी।", "ไทย", "\u0301\u0308\u200d\u200c", "🦙😀👍🏽",
    "²³Ⅷ½",
    "\u3000\u00a0\u2003", "…。\uff0c、“”\u2018\u2019—\uff1a\uff1b", "ªºǅʰ",
)  # fmt: skip
WORDS = (
    "the", "it's", "I'LL", "don't", "we've", "You're", "HelloWorld", "123", "1234", "12345", "1234567",
    "100,000", "3.14", "http://a.b/c?d=e", "foo_bar", "//", "/* */", "IMGIMGABCZ", "<sentinel:12>", "hello",
    "", "world", "   ", "\n\n", "\r\n", "        ",
)  # fmt: skip


def random_lines(n: int, seed: int = 7, longest: int = 20) -> list[str]:
    rng = random.Random(seed)
    return [_line(rng, rng.choices(ALPHABETS, k=rng.randint(1, 4)), longest) for _ in range(n)]


def _line(rng: random.Random, alphabets: list[str], longest: int) -> str:
    parts = []
    for _ in range(rng.randint(1, longest)):
        kind = rng.random()
        if kind < 0.25:
            parts.append(rng.choice(WORDS))
        elif kind < 0.5:
            parts.append(" ")
        else:
            parts += (rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 7)))
    return "".join(parts)
