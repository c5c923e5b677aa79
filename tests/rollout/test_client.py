"""A real engine: token ids in, token ids and log-probs out."""

import asyncio
import math
import os

import numpy as np
import pytest
import torch

from megarl.errors import MegarlError
from megarl.rollout.client import EngineClient, EngineUnavailable, Sampling

EOS = 1
PROMPTS = [np.array(ids, np.int32) for ids in ([3, 20, 31, 40, 5], [7], [9, 9, 9, 50, 51, 52, 53, 54, 55, 60, 61])]


@pytest.fixture
def ask(driver, engine_socket_dir):
    """ask(lambda client: coroutine) -> its result, on the shared engine."""

    def run(work):
        async def main():
            client = EngineClient("engine 0", os.fspath(engine_socket_dir / "engine_0.sock"), timeout_seconds=60)
            try:
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(main())

    return run


def everything(sampling):
    return lambda client: asyncio.gather(*(client.complete(prompt, sampling) for prompt in PROMPTS))


def reference_logprobs(model, prompt, completion, temperature):
    """transformers: log-softmax of logits / temperature at each completion token, [T]."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / temperature, -1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.float32).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(ask, reference, temperature):
    groups = ask(everything(Sampling(n=6, temperature=temperature, max_tokens=8, seed=5)))
    for prompt, group in zip(PROMPTS, groups):
        assert len(group) == 6
        for completion in group:
            expected = reference_logprobs(reference, prompt, completion, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
            assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
            assert completion.loss_mask.tolist() == [1] * len(completion.token_ids)
            assert completion.weight_version.tolist() == [0] * len(completion.token_ids)


def test_greedy_takes_the_most_likely_token(ask, reference):
    for prompt, [completion] in zip(PROMPTS, ask(everything(Sampling(n=1, temperature=0.0, max_tokens=8, seed=0)))):
        ids = prompt.tolist()
        for token in completion.token_ids.tolist():
            with torch.no_grad():
                assert int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
        np.testing.assert_allclose(
            completion.logprobs, reference_logprobs(reference, prompt, completion, 1.0), atol=1e-4, rtol=0
        )


def test_the_end_token_ends_a_completion_and_belongs_to_it(ask):
    completions = sum(ask(everything(Sampling(n=40, temperature=1.5, max_tokens=8, seed=11))), [])
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert len(stopped) >= 3 and len(stopped) + len(cut) == 120
    assert all(completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1] for completion in stopped)
    assert all(len(completion.token_ids) == 8 and EOS not in completion.token_ids for completion in cut)


def test_seeds_reproduce_and_differ(ask):
    def tokens(groups):
        return [[completion.token_ids.tolist() for completion in group] for group in groups]

    def logprobs(groups):
        return np.concatenate([completion.logprobs for group in groups for completion in group])

    sampling = Sampling(n=8, temperature=1.0, max_tokens=8, seed=2**61)
    first, again = ask(everything(sampling)), ask(everything(sampling))
    assert tokens(first) == tokens(again)
    np.testing.assert_array_equal(logprobs(first), logprobs(again))
    assert all(len({tuple(ids) for ids in group}) == 8 for group in tokens(first))
    assert tokens(ask(everything(sampling.with_seed(2**61 + 100)))) != tokens(first)


def test_sampling_follows_the_distribution(ask, reference):
    """One token, many draws: frequencies match softmax(logits), so nothing filters or sharpens the distribution."""
    draws = 3000
    [group] = ask(lambda client: asyncio.gather(client.complete(PROMPTS[0], Sampling(draws, 1.0, 1, seed=3))))
    with torch.no_grad():
        probabilities = torch.softmax(
            reference(input_ids=torch.tensor([PROMPTS[0].tolist()])).logits[0, -1], -1
        ).numpy()
    counts = np.bincount([completion.token_ids[0] for completion in group], minlength=len(probabilities))
    expected = probabilities * draws
    usual = expected >= 5
    chi2 = ((counts - expected)[usual] ** 2 / expected[usual]).sum()
    freedom = usual.sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_refusals_carry_the_servers_words(ask):
    with pytest.raises(MegarlError, match=r"engine 0 refused /v1/completions \(HTTP 400\): .*24") as caught:
        ask(lambda client: client.complete(np.full(30, 9, np.int32), Sampling(1, 1.0, 8, seed=0)))
    assert not isinstance(caught.value, EngineUnavailable)
    with pytest.raises(MegarlError, match=r"engine 0 refused /v1/completions \(HTTP 400\): .*500"):
        ask(lambda client: client.complete(np.array([500], np.int32), Sampling(1, 1.0, 8, seed=0)))


def test_no_answer_is_worth_another_try(tmp_path):
    async def main():
        client = EngineClient("engine 3", os.fspath(tmp_path / "nobody.sock"), timeout_seconds=60)
        try:
            assert not await client.healthy()
            with pytest.raises(EngineUnavailable, match="engine 3 broke off /v1/completions"):
                await client.complete(PROMPTS[0], Sampling(1, 1.0, 8, seed=0))
            assert client.pending_completions == 0
        finally:
            await client.close()

    asyncio.run(main())


def test_time_outs_are_told(tmp_path):
    async def main():
        server = await asyncio.start_unix_server(lambda reader, writer: asyncio.sleep(5), tmp_path / "slow.sock")
        client = EngineClient("engine 3", os.fspath(tmp_path / "slow.sock"), timeout_seconds=0.2)
        try:
            with pytest.raises(EngineUnavailable, match="engine 3 did not answer /v1/completions within 0.2 s"):
                await client.complete(PROMPTS[0], Sampling(1, 1.0, 8, seed=0))
        finally:
            await client.close()
            server.close()

    asyncio.run(main())
