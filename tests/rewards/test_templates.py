"""Conversations in a reward model's words, with a tokenizer other than the policy's."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megarl.rewards.templates import reward_model_ids

WORDS = ["<unk>", "<bos>", "<eot>", "user", "assistant", "system", "hello", "good", "day"]
TEMPLATE = """{{ bos_token }} {% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}
{% endif %}{{ m.role }} {{ m.content }} <eot> {% endfor %}"""


@pytest.fixture
def tokenizer():
    words = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<bos>", eos_token="<eot>")
    made.chat_template = TEMPLATE
    return made


def words(tokenizer, prompt, completion, max_length=100, **kwargs):
    ids = reward_model_ids(tokenizer, prompt, completion, max_length, **kwargs)
    assert ids.dtype == "int32"
    return " ".join(WORDS[i] for i in ids)


def test_the_reward_models_template_and_no_second_bos(tokenizer):
    expected = "<bos> user hello <eot> assistant good day <eot>"
    assert words(tokenizer, [{"role": "user", "content": "hello"}], "good day") == expected
    assert words(tokenizer, "hello", "good day") == expected


def test_plain_text_without_a_template(tokenizer):
    tokenizer.chat_template = None
    assert words(tokenizer, "hello ", "good day") == "<bos> hello good day"
    with pytest.raises(ValueError, match="has no chat template, and prompts are lists"):
        words(tokenizer, [{"role": "user", "content": "hello"}], "good")


def test_too_long(tokenizer):
    with pytest.raises(ValueError, match="are 8 tokens for the reward model .* which takes 7"):
        words(tokenizer, "hello", "good day", 7)
    assert words(tokenizer, "hello", "good day", 8) == words(tokenizer, "hello", "good day")
    assert words(tokenizer, "hello", "good day", 4, truncation="left") == "assistant good day <eot>"
    with pytest.raises(ValueError, match="truncation is 'right'; allowed: error, left"):
        words(tokenizer, "hello", "good day", truncation="right")


def test_a_template_that_refuses(tokenizer):
    with pytest.raises(ValueError, match=r"refuses a conversation with the roles \['system', 'assistant'\]: no system"):
        words(tokenizer, [{"role": "system", "content": "hello"}], "good")
