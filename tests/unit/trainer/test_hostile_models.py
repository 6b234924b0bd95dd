"""A model's folder comes from elsewhere: nothing in it may run code here."""

import json
import os
from pathlib import Path

import anyio
import pytest
import torch

from lachesis.pipeline.inference.protocol import TokenizeRequest
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy, load_model, save_policy
from lachesis.schemas.errors import ConfigError, DataError

pytestmark = pytest.mark.hostile


@pytest.fixture
def policy() -> PolicyModel:
    return build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64)


class _Touches:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.file), 0o700)


def test_pickled_weights_are_refused(policy: PolicyModel, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"x": _Touches(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_model(tmp_path / "model")
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_is_not_run(policy: PolicyModel, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "model_type": "hostile",
        "auto_map": {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.M"},
    }
    file.write_text(json.dumps(config))
    (tmp_path / "model" / "hostile.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_model(tmp_path / "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__['os'].mkdir(ran) }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir(ran) }}",
        "{{ messages.__class__ }}{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ 'x' * messages[0].content.zzz }}",
        "{% if %}",
    ],
)
def test_a_chat_template_cannot_do_harm(policy: PolicyModel, tmp_path: Path, template: str) -> None:
    ran = tmp_path / "ran"
    policy.tokenizer.chat_template = template.replace("ran)", f"{str(ran)!r})")
    body = TokenizeRequest(messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(DataError, match="chat template"):
        anyio.run(TextTokenizer(policy.tokenizer, 64).tokens, body)
    assert not ran.exists()
