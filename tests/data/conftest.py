import pytest

from megarl.data.arithmetic import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """One token per character; `<|user|>` 3, `<|assistant|>` 4, `<|end|>` 1."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer():
    """The same without a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    return tokenizer
