"""Run the conformance suite, and test that files of other formats are rejected."""

import pytest
from toyexp_my_format import MyFormat

from toyexp import UserError
from toyexp.testing import FormatSuite
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Llama

SMALL = {"vocab": 257, "d_model": 16, "context": 8}


class TestMyFormat(FormatSuite):
    form, models = MyFormat(), [Llama(**SMALL), GPT2(**SMALL)]
    unsupported = [Llama(vocab=100_000, d_model=64)]


class TestIndented(FormatSuite):
    form, models = MyFormat(indent=True), [GPT2(**SMALL)]


@pytest.mark.parametrize("text", ["", "[]", '{"model": "llama"}', '{"model": "else", "tensors": {}}'])
def test_another_file_is_rejected(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match=r"other\.json: (not a model|unknown model 'else')"):
        MyFormat().read(tmp_path / "other.json", [Llama])
