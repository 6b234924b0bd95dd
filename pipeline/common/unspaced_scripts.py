"""The scripts that are written without blanks between words, for patterns that take a text apart."""

__all__ = ["UNSPACED"]

UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029"
    "\u3041-\u312f\u3131-\u318f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua980-\ua9df\uaa00-\uaadf\uf900-\ufaff\uff66-\uff9d"
    "\U00016f00-\U00016fff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Thai, Lao, Tibetan, Burmese, Khmer, Tai, Javanese, Cham, Chinese and Japanese, as the inside of a character class."""
