from megarl.config.root import TrainConfig
from megarl.config.schema import holder, nearest, plain_keys, schema, type_text


def test_dotted_keys_of_all_sections():
    known = schema(TrainConfig)
    assert {"actor", "actor.optim", "actor.optim.lr", "data.train_files"} <= set(known)
    assert "actor.optim" not in plain_keys(known) and "actor.optim.lr" in plain_keys(known)
    assert holder("data.train_files.path", known) == "data.train_files"
    assert holder("actor.optim", known) is None and holder("actor.nope", known) is None


def test_nearest_names():
    keys = plain_keys(schema(TrainConfig))
    assert nearest("actor.lr", keys)[0] == "actor.optim.lr"
    assert nearest("rollout.temprature", keys)[0] == "rollout.temperature"
    assert nearest("trainer.temperature", keys)[0] == "rollout.temperature"
    assert nearest("qqq", keys) == []


def test_types_in_words():
    assert type_text(int | None) == "whole number or null"
    assert type_text(list[str]) == "list of text"
    assert type_text(tuple[float, float]) == "2 values: number, number"
