"""Turns LaTeX and typography of a short answer into plain text, for reading a number.

It keeps digits, letters, ASCII operators, and "°" for degrees. Thin spaces become NARROW, which only separates groups
of digits. Commands with a meaning stay, so that an expression is not taken for a number.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re
import unicodedata

__all__ = ["NARROW", "plain", "unwrapped"]

NARROW = "\u202f"
"""A space that stands between groups of digits and nowhere else."""
_THIN = "\u00a0\u2007\u2008\u2009\u200a\u202f"
_MINUS = "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u207b"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_TABLE = str.maketrans({
    **dict.fromkeys(_THIN, NARROW),
    **dict.fromkeys(_MINUS, "-"),
    **dict.fromkeys("⋅·∙∗", "×"),
    **dict.fromkeys("÷", r"\div "),
    **dict.fromkeys("≈≃≅", "~"),
    **dict.fromkeys("＂“”„", '"'),
    **dict.fromkeys("ʼ’‘´`", "'"),
    "º": "°", "˚": "°", "⁄": "/", "∕": "/", "＝": "=", "：": ":", "。": ".", "，": ",", "、": ",", "（": "(", "）": ")",
    "≧": "≥", "⩾": "≥", "≳": "≥", "≦": "≤", "⩽": "≤", "≲": "≤",
    "＄": "$", "％": "%", "٪": "%", "٫": ".", "٬": "'", "！": "!",
    "\u200b": None, "\u200c": None, "\u200d": None,
    "\ufeff": None, "\u200e": None, "\u200f": None, "\u2060": None, "\u2061": None, "\u00ad": None,
})  # fmt: skip
_RAISED = re.compile(rf"[⁺⁻]?[{_SUPERSCRIPTS}]+")
_VULGAR = re.compile(r"[¼½¾⅐-⅞↉]")
_SPACES = re.compile(r"\\(?:thinspace|,)|\\ (?=\d)|(?<=\d)~(?=\d)")
_NOTHING = re.compile(
    r"\\[!](?!=)|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|bf|rm|it|sf|tt|normalsize|large|Large|"
    r"bfseries|itshape|null|phantom\{\})(?![A-Za-z])[.]?"
)
_BLANKS = re.compile(r"\\(?:[;:> \\]|(?:quad|qquad|enspace|hspace\*?\{[^{}]*\}|space|newline)(?![A-Za-z]))")
_GROUP_BLANK = re.compile(r"(?<=\d)\{\s*(?:\\[,;: ]|~| )\s*\}(?=\d)")
_GROUP_SIGN = re.compile(
    r"(?:\\(?:text|mathrm|mbox|mathord|mathpunct|mathbin)\s*)?\{\s*([,.:])\s*\}|\s*\\colon(?![A-Za-z])\s*"
)
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}\s*\}"
    r"\s*\{\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}\s*\}"
    r"|\\mathrm\s*\{\s*\\[dt]?frac\s*\{([A-Za-z]+)\}\{([A-Za-z]+)\}\s*\}"
)
_MICRO = re.compile(r"\\(?:mu|micro)\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\(?:degree|degrees|textdegree)(?![A-Za-z])")
_ORDINAL = re.compile(
    r"(?<=\d)\s*\^\s*\{?\s*(?:\\(?:text|mathrm|textrm)\s*\{\s*(st|nd|rd|th)\s*\}|(st|nd|rd|th))\s*\}?"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|md|up)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|operatorname\*?|"
    r"boldsymbol|bm|pmb|underline|boxed|fbox|ensuremath|unit|si|fcolorbox\{[^{}]*\}\{[^{}]*\}|color(?:box)?\{[^{}]*\}|"
    r"textcolor\{[^{}]*\})\s*\{((?:[^{}]|(?<=\^)\{[^{}]*\})*)\}"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_BRACED = re.compile(r"(?<![\^_A-Za-z}])\{\s*([-+]|[-+]?[\d.,]*\d)\s*\}")
_SIMPLE = re.compile(r"\s*[-+]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*")
_ROOT = re.compile(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_SIUNITX = re.compile(r"\\(?:num|qty|SI)\s*(?:\[[^\]]*\])?\s*\{([^{}]*)\}(?:\s*\{([^{}]*)\})?")
_COLOR = re.compile(r"\\color\s*\{[^{}]*\}")
_PLAIN_NAMES = re.compile(
    r"(?<![A-Za-z\\])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|exp|ln|log|pi|infinity)(?![A-Za-z])"
)
_PLAIN_ROOT = re.compile(r"(?<![A-Za-z])\\?sqrt\s*\(([^()]*)\)")
_PLAIN_SIGNS = ((">=", r"\ge "), ("<=", r"\le "), ("!=", r"\ne "), ("**", "^"), ("*", r"\cdot "))
_ACCENT = re.compile(r"\\(hat|vec|bar|overline|tilde)\s+([A-Za-z])(?![A-Za-z])")
_SYMBOLS = {"π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "±": r"\pm ", "×": r"\cdot ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "θ": r"\theta "}  # fmt: skip
_MAX_PASSES = 8


def plain(text: str) -> str:
    """Return the text without typography and without LaTeX that changes no value."""
    return _structured(typographic(text)).replace("\\$", "$").replace("\\%", "%").replace("\\#", "#").strip()


def unwrapped(text: str) -> str:
    """Return LaTeX without typography and without what only sets the type, for computer algebra."""
    text = _ROOT.sub(
        lambda found: f"\\sqrt{{{found[1] or found[2] or found[3]}}}", typographic(text).replace(NARROW, "")
    )
    for symbol, command in (*_SYMBOLS.items(), *_PLAIN_SIGNS):
        text = text.replace(symbol, command)
    text = _PLAIN_NAMES.sub(lambda found: "\\infty " if found[1] == "infinity" else f"\\{found[1]} ", text)
    text = _ACCENT.sub(r"\\\1{\2}", _PLAIN_ROOT.sub(r"\\sqrt{\1}", _COLOR.sub("", text)))
    text = re.sub(r"\\(?:mathrm|text)\s*\{([a-z])\}", r"\1", _NOTHING.sub("", text))
    text = re.sub(r"\\log_(?:e|\{e\})(?![A-Za-z])", r"\\ln", text)
    for _ in range(_MAX_PASSES):
        changed = re.sub(r"\\(?:boxed|fbox|textbf|mathbf|boldsymbol|bm|ensuremath)\s*\{([^{}]*)\}", r"\1", text)
        if changed == text:
            break
        text = changed
    return text.strip()


def typographic(text: str) -> str:
    """Return the text with ASCII digits, signs and separators."""
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found.group()), text)
    text = _RAISED.sub(_lowered, text).translate(_TABLE)
    if text.isascii():
        return text
    return "".join(_ascii_digit(char) for char in text)


def _ascii_digit(char: str) -> str:
    if char.isascii():
        return char
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    return unicodedata.normalize("NFKC", char) if "\uff01" <= char <= "\uff5e" else char


def _lowered(found: re.Match[str]) -> str:
    digits = "".join(str(_SUPERSCRIPTS.index(c)) if c in _SUPERSCRIPTS else "+-"["⁺⁻".index(c)] for c in found.group())
    return "^{" + digits + "}"


def _structured(text: str) -> str:
    if "\\" not in text and "$" not in text and "{" not in text:
        return text
    text = _GROUP_BLANK.sub(NARROW, _SIUNITX.sub(_measured, _COLOR.sub("", text)))
    text = _GROUP_SIGN.sub(lambda found: found[1] or ":", text).replace("\\$", "\ue000").replace("\\%", "%")
    text = _UNIT_FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]} ", text)
    text = re.sub(r"\\(?:Omega|ohm)(?![A-Za-z])", "Ω", _MICRO.sub(r" µ\1 ", text))
    text = _ORDINAL.sub(lambda found: found[1] or found[2], _DEGREES.sub("°", text))
    if "\\" in text:
        text = re.sub(r"(?<!\d)~|~(?!\d)", " ", text)  # a tie
    text = _BRACED.sub(r"\1", text)
    text = _BLANKS.sub(" ", _NOTHING.sub("", _SPACES.sub(NARROW, text)))
    text = re.sub(r"\\(?:times|cdot|ast)(?![A-Za-z])", "×", text)
    text = re.sub(r"\\(?:approx|simeq|sim|doteq)(?![A-Za-z])", "~", text)
    text = re.sub(r"\\(?:euro|texteuro|EUR)(?![A-Za-z])", "€", text)
    text = re.sub(r"\\(?:pounds|textsterling)(?![A-Za-z])", "£", text)
    for _ in range(_MAX_PASSES):
        changed = _FRACTION.sub(_fraction, _TEXT.sub(r" \1 ", text))
        if changed == text:
            break
        text = changed
    text = re.sub(r"\\[()\[\]]|\$", " ", text)
    return text.replace("\ue000", "$")


def _measured(found: re.Match[str]) -> str:
    """Return the number of siunitx and its unit, \\SI{5}{km} say, without commands of units."""
    return f"{found[1]} {(found[2] or '').replace(chr(92), ' ')} "


def _fraction(found: re.Match[str]) -> str:
    above, below = found[1] or found[2] or "", found[3] or found[4] or ""
    above, below = above.strip(), below.strip()
    if below.startswith("-"):
        above, below = above[1:] if above.startswith("-") else f"-{above}", below[1:]
    if _SIMPLE.fullmatch(above) and _SIMPLE.fullmatch(below):
        return f" {above.strip().replace(' ', '')}/{below.strip().replace(' ', '')} "
    return f"\\quotient({above})({below})"
