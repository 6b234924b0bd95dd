"""Variables of the environment by which people know settings of a run, beside `LACHESIS_*`."""

from typing import Final

__all__ = ["MODEL_VARIABLES"]

MODEL_VARIABLES: Final = {
    "STUDENT_MODEL": "model",
    "STUDENT_TOKENIZER": "tokenizer",
    "TEACHER_MODEL": "inference.teacher.model",
    "TEACHER_TOKENIZER": "inference.teacher.tokenizer",
}
"""Setting by variable."""
