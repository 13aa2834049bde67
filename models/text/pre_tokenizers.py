"""Pre-tokenizers by the names in `tokenizer.ggml.pre`. A pre-tokenizer splits text into words, within which
BPE merges bytes. Regular expressions (in Oniguruma's syntax) apply in order, and each splits every piece of
text into matches and the text between matches.
"""

from dataclasses import dataclass

# The classes list both cases, because (?i:...) would also match the long s (U+017F).
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_K2_HORIZON = _WORDS.replace(r"\p{L}+|", r"[\p{L}\p{M}\u200C\u200D]+|") % r"\p{N}{1,3}"
_UFAKZEKA = _QWEN2.removeprefix(_SUFFIX + "|")
_JAIS2 = (_WORDS % r"\p{N}{1,3}").removesuffix(r"\s+(?!\S)|\s+") + (
    "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s"
)
_EXAONE_MOE = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _cased(suffix: str, digits: str, but: str = "") -> str:
    """Return a pattern for words of capitals followed by small letters. Either part may be missing."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{digits}"


_CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = _cased("", r"\p{N}") + _CASED_END
_GPT4O = _cased(_SUFFIX + "?", r"\p{N}{1,3}") + _CASED_END
# The first alternative separates Han characters. The original tokenizer folds case, so this pattern uses
# (?i:...).
_KIMI = (
    r"\p{Han}+|"
    + _cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}", r"&&[^\p{Han}]")
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _SPACES
)

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of all scripts with upper and lower case in Unicode 10.
_CASED_SCRIPTS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_MARKS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _MARKS + r"[\r\n]*|" + _SPACES
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _HAN_KANA
)

# Splits digits into groups of three from the right, in linear time. The models' expressions take quadratic
# time.
_AFMOE_DIGITS = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})++\z)", r"\p{N}{3}")
# Splits like \d{1,3}(?=(?:\d{3})*\b), which does not split digits before a letter.
_AYA_DIGITS = (
    r"(?<!\d)\d++\b",
    r"\A\d{1,2}(?=(?:\d{3})++\z)",
    r"(?:\A(?=\d++\z)|(?<=\d)\G)\d{3}",
)
# Splits like (?=(\d{3})+(?!\d)), which splits before each group of three.
_SUPERBPE_DIGITS = (
    r"\p{N}+",
    r"(?<=\A|\D|\A\d|\D\d|\A\d\d|\D\d\d)(?=(?:\d{3})++(?!\d))",
    r"\G\d{3}(?=\d{3})",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """If `ignore_merges`, a word that is a token is not merged. `add_bos` is the default of the file's
    flag."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


@dataclass(frozen=True, slots=True)
class LineTokenizer:
    """Splits text into lines, in which characters are merged. If `whole_runs`, a run of line feeds that is a
    token is not split. If `words`, each line begins with a space and is split before each space."""

    always_bos: bool = True
    whole_runs: bool = True
    words: bool = False


_default = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_llama3_words = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))
_bailing = PreTokenizer((_BAILING,))
_gpt4o = PreTokenizer((_GPT4O,))
_bloom = PreTokenizer((_BLOOM,))
_aya = PreTokenizer((*_AYA_DIGITS, _GPT4O))
_deepseek3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))

LINE_TOKENIZERS = {
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), LineTokenizer()),
    "mmbert": LineTokenizer(always_bos=False, words=True),
    "sarvam-moe": LineTokenizer(always_bos=False, whole_runs=False),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _default,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum"), _gpt2),
    **dict.fromkeys(("modern-bert", "exaone4", "trillion", "granite-docling", "roberta-bpe"), _gpt2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"), _gpt2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _digits_gpt2),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _digits_gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _llama3),
    **dict.fromkeys(("midm-2.0", "jina-v5-nano"), _llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _llama3_words),
    "glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), _qwen2),
    **dict.fromkeys(("kormo", "grok-2", "solar-open", "f2llmv2"), _qwen2),
    "qwen35": PreTokenizer((_QWEN35,)),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _gpt4o),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _aya),
    "kimi-k2": PreTokenizer((_KIMI,), ignore_merges=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_SCRIPTS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s++$",  # the same as \s+$, which takes quadratic time on spaces before a digit
            _CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _MARKS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": PreTokenizer((*_AFMOE_DIGITS, _ASIAN, _DEEPSEEK3)),
    "youtu": PreTokenizer((_YOUTU, _cased(_SUFFIX + "?", r"\p{N}") + _CASED_END), ignore_merges=True),
    "superbpe": PreTokenizer(_SUPERBPE_DIGITS),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _WORDS % r"\p{N}+"), ignore_merges=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "k2-horizon": PreTokenizer((_K2_HORIZON,)),
    "ufakzeka": PreTokenizer((_UFAKZEKA,)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _bloom),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}
