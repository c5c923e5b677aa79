import numpy as np
import pytest

from megarl.data.tokenizer import PromptEncoder, encode_answer, encode_prompt, load_tokenizer


def test_messages_and_plain_text_take_the_chat_template(tokenizer):
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "1+2="}])
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "<|user|>1+2=<|end|><|assistant|>"
    assert encode_prompt(tokenizer, "1+2=").tolist() == ids.tolist()


def test_plain_text_stays_raw_without_a_chat_template(plain_tokenizer):
    assert plain_tokenizer.decode(encode_prompt(plain_tokenizer, "1+2=")) == "1+2="


def test_messages_without_a_chat_template_are_refused(plain_tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        encode_prompt(plain_tokenizer, [{"role": "user", "content": "hi"}])


def test_a_prompt_without_tokens_is_refused(plain_tokenizer):
    with pytest.raises(ValueError, match="gives no token"):
        encode_prompt(plain_tokenizer, "")


def test_an_answer_ends_with_the_end_token(tokenizer):
    assert encode_answer(tokenizer, "7").tolist() == [tokenizer.convert_tokens_to_ids("7"), tokenizer.eos_token_id]
    assert encode_answer(tokenizer, "").tolist() == [tokenizer.eos_token_id]


def test_encoder_equals_encode_prompt_and_keeps_text_and_messages_apart(tokenizer):
    encode = PromptEncoder(tokenizer)
    text = '[{"role": "user", "content": "a"}]'
    messages = [{"role": "user", "content": "a"}]
    for prompt in (text, messages, text):
        assert encode(prompt).tolist() == encode_prompt(tokenizer, prompt).tolist()


def test_load_from_a_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert encode_prompt(loaded, "a b\n").tolist() == encode_prompt(tokenizer, "a b\n").tolist()
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_missing_and_half_written_folders_are_told(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(str(tmp_path / "no" / "where"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its files cannot be read") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
