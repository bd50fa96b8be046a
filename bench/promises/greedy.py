"""Logits and greedy answers are the reference's, and nothing but the prompt changes them."""

import torch

from bench.promise import Outcome, Promise, Workbench, ask, ask_all, greedy
from bench.prompts import PASSAGE
from bench.reference import NEAR_TIE
from kernels.select import select_kernels
from model_runner.model.load import load_decoder
from pagekeeper.cli.generate import Result
from tests.golden.paged_run import generate_greedily
from tests.golden.prompts import PROMPTS

LOGITS_BOUND = 2e-3


def prompts(bench: Workbench) -> list[list[int]]:
    """The two dozen prompts as token ids."""
    return [bench.reference.encode(text) for text in PROMPTS]


def logits_equal_transformers(bench: Workbench) -> Outcome:
    asked = prompts(bench)
    ours, _ = generate_greedily(load_decoder(bench.model, select_kernels("cpu")), asked, 1, chunk_size=24)
    theirs = torch.stack([bench.reference.logits(prompt)[-1] for prompt in asked])
    widest = float((ours - theirs).abs().max())
    return Outcome(f"{widest:.1e} apart at most", f"< {LOGITS_BOUND:g}", len(asked) >= 24 and widest < LOGITS_BOUND)


def equals_transformers(bench: Workbench) -> Outcome:
    asked = prompts(bench)
    requests = [greedy(prompt) for prompt in asked]
    for request in requests:
        request.sampling["ignore_eos"] = True
    answers = [tokens(result) for result in ask_all(bench.server, requests)]
    partings = [bench.reference.parting(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
    parted = [parting for parting in partings if parting is not None]
    widest = max((parting.gap for parting in parted), default=0.0)
    num_tokens = sum(len(answer) for answer in answers)
    return Outcome(
        f"{len(asked) - len(parted)} of {len(asked)} equal over {num_tokens} tokens, widest gap {widest:.1e}",
        f"all, or gap < {NEAR_TIE:g}",
        num_tokens >= 24 * 64 and all(parting.is_near_tie for parting in parted),
    )


def tokens(result: Result) -> list[int]:
    """Token ids of the one answer."""
    return result.candidates[0].token_ids


def compare(bench: Workbench, asked: list[list[int]], ones: list[Result], others: list[Result], note: str) -> Outcome:
    """Whether two ways to ask gave the same answers, near-ties aside."""
    partings = [
        bench.reference.gap_where_they_part(prompt, tokens(one), tokens(other))
        for prompt, one, other in zip(asked, ones, others, strict=True)
    ]
    parted = [parting for parting in partings if parting is not None]
    widest = max((parting.gap for parting in parted), default=0.0)
    return Outcome(
        f"{len(asked) - len(parted)} of {len(asked)} equal, widest gap {widest:.1e}{note}",
        f"all, or gap < {NEAR_TIE:g}",
        all(parting.is_near_tie for parting in parted),
    )


def unchanged_by_31_others(bench: Workbench) -> Outcome:
    asked = prompts(bench)[::3]
    alone = [ask(bench.server, greedy(prompt)) for prompt in asked]
    others = [greedy(bench.reference.encode(f"Number {i}: {text}"), 32 + i) for i, text in enumerate(PROMPTS)]
    together = ask_all(bench.server, [greedy(prompt) for prompt in asked] + others)
    return compare(bench, asked, alone, together[: len(asked)], "")


def with_budget(bench: Workbench, max_batch_tokens: int, asked: list[list[int]]) -> list[Result]:
    """Answers from a server whose steps hold so many tokens."""
    with bench.start("--pool-size", "256MiB", PAGEKEEPER_MAX_BATCH_TOKENS=str(max_batch_tokens)) as server:
        return [ask(server, greedy(prompt)) for prompt in asked]


def unchanged_by_chunk_size(bench: Workbench) -> Outcome:
    asked = [bench.reference.encode(PASSAGE * count) for count in (2, 5, 9)] + prompts(bench)[:3]
    return compare(bench, asked, with_budget(bench, 16, asked), with_budget(bench, 2048, asked), "")


def unchanged_by_warm_prefix(bench: Workbench) -> Outcome:
    asked = [bench.reference.encode(f"Chapter {number}. " + PASSAGE * 4) for number in range(6)]
    cold = [ask(bench.server, greedy(prompt)) for prompt in asked]
    warm = [ask(bench.server, greedy(prompt)) for prompt in asked]
    hits = [result.usage.cached_tokens if result.usage else 0 for result in warm]
    outcome = compare(bench, asked, cold, warm, f", {sum(hits)} tokens from the cache")
    return Outcome(outcome.figure, outcome.bound, outcome.passed and min(hits) > 0)


def unchanged_by_one_message(bench: Workbench) -> Outcome:
    asked = prompts(bench)[::4]
    streamed = [ask(bench.server, greedy(prompt)) for prompt in asked]
    whole = [ask(bench.server, greedy(prompt), stream=False) for prompt in asked]
    outcome = compare(bench, asked, streamed, whole, "")
    same_text = [one.candidates[0].text for one in streamed] == [one.candidates[0].text for one in whole]
    return Outcome(outcome.figure, outcome.bound + ", same text", outcome.passed and same_text)


def unchanged_by_preemption(bench: Workbench) -> Outcome:
    asked = prompts(bench)[:8]
    roomy = [ask(bench.server, greedy(prompt)) for prompt in asked]
    with bench.start("--pool-size", "18MB") as server:
        tight = ask_all(server, [greedy(prompt) for prompt in asked])
    recomputed = sum(result.usage.recomputed_tokens for result in tight if result.usage)
    outcome = compare(bench, asked, roomy, tight, f", {recomputed} tokens computed again")
    return Outcome(outcome.figure, outcome.bound, outcome.passed and recomputed > 0)


PROMISES = [
    Promise("prefill logits equal transformers' (24 prompts)", logits_equal_transformers),
    Promise("greedy answers equal transformers' (24 prompts x 64 tokens)", equals_transformers),
    Promise("an answer is unchanged by 31 others in the batch", unchanged_by_31_others),
    Promise("an answer is unchanged by the chunk size, 16 or 2048", unchanged_by_chunk_size),
    Promise("an answer is unchanged by a warm prefix", unchanged_by_warm_prefix),
    Promise("an answer is unchanged by coming in one message", unchanged_by_one_message),
    Promise("an answer is unchanged by preemption in a tiny pool", unchanged_by_preemption),
]
