"""The language of prose is named, and of numbers, formulas and programs none is."""

# ruff: noqa: RUF001 - other scripts are what is named

import tempfile
from pathlib import Path

import pytest

from lachesis.pipeline.common import text_language
from lachesis.pipeline.common.text_language import language_of
from lachesis.pipeline.errors import LanguageModelError


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "So she has 18 eggs left. The answer is 18."),
        ("de", "Die Antwort ist 18, weil sie drei Eier zum Frühstück isst."),
        ("fr", "La réponse est 18, car elle mange trois œufs au petit déjeuner."),
        ("es", "La respuesta es 18 porque ella come tres huevos en el desayuno."),
        ("zh", "答案是18，因为她早餐吃了三个鸡蛋，还用了四个做松饼。"),
        ("ja", "答えは18です。彼女は朝食に卵を三つ食べるからです。"),
        ("ru", "Ответ 18, потому что она съедает три яйца на завтрак."),
        ("ar", "الجواب هو 18 لأنها تأكل ثلاث بيضات على الفطور."),
        (None, ""),
        (None, "18"),
        (None, "\\boxed{\\frac{3}{4}}"),
        (None, "x = 3y + 2, so \\frac{3}{4} = \\boxed{18}"),
        (None, "soni inos"),
        (None, "def f(x):\n    return sum(i for i in range(x))\n\nprint(f(10))"),
        (None, "🙂🙂🙂🙂 !!! ???"),
        (None, "\ud800 \x00"),
    ],
)
def test_a_language_is_named_where_it_is_clear(language, text):
    assert language_of(text) == language


def test_without_a_folder_for_temporary_files_it_says_so_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_language._identifier.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LanguageModelError, match="Set TMPDIR to a folder"):
        language_of("So she has 18 eggs left. The answer is 18.")
    (tmp_path / "none").mkdir()
    assert language_of("So she has 18 eggs left. The answer is 18.") == "en"
