"""Undo what changes how an answer looks and not what it says: Unicode characters, sizes, spaces, dollar signs."""

import re
import unicodedata

_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00d7\u2715\u2a2f", r"\times "),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot "),
    **dict.fromkeys("\u00a0\u2007\u2009\u202f", r"\,"),
    **dict.fromkeys("\u00b0\u00ba", r"^\circ "),
    **dict.fromkeys("\u2032\u2019\u00b4", "'"),
    **dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f", ""),
    "\u00f7": r"\div ",
    "\u2215": "/",
    "\u2044": "/",
    "\u221b": r"\cbrt ",
    "\u221a": r"\sqrt ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2a7d": r"\le ",
    "\u2a7e": r"\ge ",
    "\u2260": r"\ne ",
    "\u2248": r"\approx ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2216": r"\setminus ",
    "\u2205": r"\emptyset ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}",
    "\u230a": r"\lfloor ",
    "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ",
    "\u2309": r"\rceil ",
    "\u27e8": r"\langle ",
    "\u27e9": r"\rangle ",
    "\u2220": r"\angle ",
    "\u25b3": r"\triangle ",
    "\u20ac": r"\$",
    "\u00a3": r"\$",
    "\u00a5": r"\$",
    "\u00a2": r"\text{ cents}",
}
_GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "omicron", "pi", "rho", "varsigma", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
]  # fmt: skip
_CHARACTERS |= {chr(0x3B1 + index): rf"\{name} " for index, name in enumerate(_GREEK)}
_CHARACTERS |= {chr(0x391 + index): rf"\{name.capitalize()} " for index, name in enumerate(_GREEK) if index != 17}
_CHARACTERS |= {"\u03d5": r"\phi ", "\u03d1": r"\theta ", "\u03f5": r"\epsilon "}
_VULGAR = "\u00bc\u00bd\u00be" + "".join(chr(code) for code in range(0x2150, 0x215F)) + "\u2189"
for _fraction in _VULGAR:
    _top, _, _bottom = unicodedata.normalize("NFKC", _fraction).partition("\u2044")
    _CHARACTERS[_fraction] = rf"\frac{{{_top}}}{{{_bottom}}}"
_TABLE = str.maketrans(_CHARACTERS)

_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n"
)
_SUBSCRIPTS = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u2099", "0123456789n")
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_SUBSCRIPT = re.compile("[\u2080-\u2089\u2099]+")
_ROOT_OF_NUMBER = re.compile("(\u221a|\u221b)\\s*([0-9]+(?:\\.[0-9]+)?)")
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\cbrt"}

_SIZES = re.compile(
    r"\\(?:(?:left|right|middle)(?![A-Za-z])\.?|(?:[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|"
    r"mathstrut|strut|boldsymbol|bm|rm|bf|it|sf|large|Large|small|normalsize|displaylimits|color\{[a-z]+\})(?![A-Za-z]))"
    r"[ \t]*"
)
_GROUPING_COMMA = re.compile(r",\s*\\!\s*")
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_PHANTOM = re.compile(r"\\(?:h|v)?phantom\{[^{}]*\}|\\hspace\*?\{[^{}]*\}|\\(?:text)?color\{[^{}]*\}")
_DECORATION = re.compile(r"\\(?:underline|ensuremath|mathstrut|(?:math|text)(?:bf|rm|it)(?=\s*\{\s*\\))(?![A-Za-z])")
_DIGITS_WITH_BASE = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([0-9A-Z]{1,64})\}(?=\s*_)")
_CURRENCY_NAME = re.compile(r"(?:US|CA|AU)\s*(?=\\?\$)")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_SPEED = re.compile(r"(?<=[0-9}])\s*((?:k|c)?m|ft|mi)\s*/\s*(s|h|hr|min)(\^\{?2\}?)?$")
_SPACES = re.compile(r"\s+")  # in one at once: other patterns would try each of a long run
_SPACE_COMMANDS = frozenset({r"\,", r"\;", r"\:", "\\ ", r"\\"})
MAX_WRAPPERS = 8
_DOLLAR = re.compile(r"(?<!\\)\$")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def to_latex(answer: str) -> str:
    """ASCII LaTeX without sizes, dollar signs around it and a final full stop; spaces and separators are kept."""
    text = _SPACES.sub(" ", answer if answer.isascii() else _to_ascii(answer))
    if "\\" in text:
        text = _GROUPING_COMMA.sub("{,}", _SIZES.sub("", _DECORATION.sub("", _PHANTOM.sub("", text))))
        text = _DIGITS_WITH_BASE.sub(r"\1", _NEGATIVE_SPACE.sub("", text))
    return _written_out(_unwrapped(text))


def _written_out(text: str) -> str:
    r"""Plain text's `6 x 10^23`, `US$5` and `10 m/s` in the words of LaTeX."""
    if "/" in text:
        text = _SPEED.sub(r"\\text{ \1/\2\3}", text)
    if "$" in text:
        text = _CURRENCY_NAME.sub("", text)
    return _TIMES_TEN.sub(r"\\times ", text) if "^" in text else text


def _to_ascii(text: str) -> str:
    text = _ROOT_OF_NUMBER.sub(lambda root: f"{_ROOTS[root[1]]}{{{root[2]}}}", text)
    text = _SUPERSCRIPT.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT.sub(lambda run: f"_{{{run[0].translate(_SUBSCRIPTS)}}}", text)
    text = text.translate(_TABLE)
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def _unwrapped(text: str) -> str:
    for _ in range(MAX_WRAPPERS):
        before = text
        text = _stripped(text)
        if text.endswith(".") and not text.endswith(".."):
            text = _stripped(text[:-1])
        for start, end in _WRAPPERS:
            inner = text[len(start) : -len(end)]
            if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
                if _DOLLAR.search(inner) or "\\(" in inner or "\\[" in inner or inner.endswith("\\"):
                    continue
                text = inner
                break
        if text == before:
            break
    return text


def _stripped(text: str) -> str:
    """Without spaces and line breaks at the ends, in LaTeX or plain; in one pass, as there may be very many."""
    start, end = 0, len(text)
    while start < end and (width := _space_width(text[start], text[start : start + 2])):
        start += width
    while start < end and (width := _space_width(text[end - 1], text[max(start, end - 2) : end])):
        end -= width
    return text[start:end]


def _space_width(character: str, pair: str) -> int:
    if pair in _SPACE_COMMANDS:
        return 2
    return 1 if character.isspace() or character == "~" else 0
