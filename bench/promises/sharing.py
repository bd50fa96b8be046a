"""What several answers to a prompt have in common is computed and stored once, and changes none of them."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.promise import Outcome, Promise, Request, Workbench, ask, ask_all, greedy
from bench.promises import tested
from bench.promises.cache import blocks_in_use
from bench.prompts import PASSAGE
from bench.sharing import PUBLISHED, Published, measure
from pagekeeper.cli.generate import Result
from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient, BeamSearch, Sampling
from tests.golden.prompts import PROMPTS

_SCORE_BOUND = 1e-3
_BEAM_TOKENS = 48
_CANDIDATE_TOKENS = 32


def answers(result: Result) -> list[list[int]]:
    """Token ids of each candidate."""
    return [candidate.token_ids for _, candidate in sorted(result.candidates.items())]


def left_behind(server: Server) -> str:
    """What should have been given back and was not, or is broken."""
    in_use = blocks_in_use(server)
    with AdminClient(server.admin) as admin:
        violations = len(admin.audit())
    return f"; {in_use} blocks in use afterwards, {violations} broken invariants" if in_use or violations else ""


def beams_equal_transformers(bench: Workbench, width: int) -> Outcome:
    prompts = [bench.reference.encode(text) for text in PROMPTS]
    sampling = Sampling(n=width, max_tokens=_BEAM_TOKENS, beam_search=BeamSearch(width))
    server = bench.server  # to be started here: it ends with the thread that started it
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda prompt: ask(server, Request(prompt, sampling)), prompts))
    num_equal, widest = 0, 0.0
    for prompt, result in zip(prompts, results, strict=True):
        expected = bench.reference.search(prompt, width, _BEAM_TOKENS)
        num_equal += answers(result) == [token_ids for token_ids, _ in expected]
        scores = [candidate.score or 0.0 for _, candidate in sorted(result.candidates.items())]
        widest = max(widest, *(abs(ours - theirs) for ours, (_, theirs) in zip(scores, expected, strict=True)))
    left = left_behind(server)
    return Outcome(
        f"{num_equal} of {len(prompts)} searches equal, scores {widest:.1e} apart at most{left}",
        f"all, < {_SCORE_BOUND:g}",
        num_equal == len(prompts) >= 24 and widest < _SCORE_BOUND and not left,
    )


def peaks_while(server: Server, work: Callable[[], Result]) -> tuple[Result, int, float]:
    """The most physical blocks, and the most saved by sharing, that statistics showed until `work` was done."""
    most_blocks, most_saved = 0, 0.0
    with ThreadPoolExecutor(1) as threads, AdminClient(server.admin) as admin:
        working = threads.submit(work)
        while not working.done():
            usage = admin.stats()["usage"]
            most_blocks = max(most_blocks, usage["physical_blocks"])
            most_saved = max(most_saved, usage["sharing_saved"])
            time.sleep(0.005)
        return working.result(), most_blocks, most_saved


def prompt_is_shared(bench: Workbench, num_prompt: int, copies: int) -> Outcome:
    prompt = bench.reference.encode(f"A promise about {num_prompt} tokens. " + PASSAGE * 20)[:num_prompt]
    blocks_in_use(bench.server)
    with AdminClient(bench.server.admin) as admin:
        before = admin.stats()
        sampling = Sampling(n=8, seed=1, max_tokens=_CANDIDATE_TOKENS, ignore_eos=True)
        result, blocks, saved = peaks_while(bench.server, lambda: ask(bench.server, Request(prompt, sampling)))
        after = admin.stats()
    size = after["pool"]["block_size"]
    own = -(-(num_prompt + _CANDIDATE_TOKENS) // size) - num_prompt // size
    most = num_prompt // size + 8 * own + 8
    copied = after["ops"]["copy_on_write"] - before["ops"]["copy_on_write"]
    opened = after["prefix"]["queried_tokens"] - before["prefix"]["queried_tokens"]
    recomputed = result.usage.recomputed_tokens if result.usage else -1
    left = left_behind(bench.server)
    return Outcome(
        f"{opened} tokens opened, {recomputed} computed again, {blocks} blocks at most, {copied} copied, "
        f"{saved:.0%} saved{left}",
        f"{num_prompt}, 0, <= {most}, {copies}, >= 50%",
        (opened, recomputed, copied) == (num_prompt, 0, copies) and blocks <= most and saved >= 0.5 and not left,
    )


def candidates_are_their_own(bench: Workbench) -> Outcome:
    prompt = bench.reference.encode(PROMPTS[0])
    seeded = Request(prompt, Sampling(n=4, seed=42, temperature=0.8, max_tokens=_CANDIDATE_TOKENS))
    alone, again = (answers(ask(bench.server, seeded)) for _ in range(2))
    rng = random.Random(42)
    others = [greedy(bench.reference.encode(text), 24 + i) for i, text in enumerate(PROMPTS)]
    others += [
        Request(
            bench.reference.encode(f"{i}. {PROMPTS[i]}"), Sampling(temperature=rng.uniform(0.5, 1.5), max_tokens=40)
        )
        for i in range(31 - len(others))
    ]
    among = answers(ask_all(bench.server, [seeded, *others])[0])
    distinct = len(set(map(tuple, alone)))
    return Outcome(
        f"{distinct} different answers; again: {sum(map(list.__eq__, alone, again))} equal; "
        f"among {len(others)} others: {sum(map(list.__eq__, alone, among))} equal",
        "4, 4, 4 among 31",
        distinct == 4 and alone == again == among and len(others) == 31,
    )


def drawn_tokens_outlast_rounding(bench: Workbench) -> Outcome:
    requests = [
        Request(
            bench.reference.encode(f"Chapter {seed}. {PASSAGE}{text}"),
            Sampling(temperature=1.0, seed=seed, max_tokens=64, ignore_eos=True),
        )
        for seed, text in enumerate(PROMPTS)
    ]
    cold = [answers(ask(bench.server, request))[0] for request in requests]
    warm = [ask(bench.server, request) for request in requests]
    together = [answers(result)[0] for result in ask_all(bench.server, requests)]
    differ = sum(ours != theirs for ours, theirs in zip(cold, together, strict=True))
    differ += sum(ours != answers(theirs)[0] for ours, theirs in zip(cold, warm, strict=True))
    hits = min(result.usage.cached_tokens if result.usage else 0 for result in warm)
    return Outcome(
        f"{differ} of {2 * len(requests)} answers differ, at least {hits} tokens each from the cache",
        "0, > 0",
        differ == 0 and hits > 0,
    )


def unchanged_by_preemption(bench: Workbench) -> Outcome:
    prompts = [bench.reference.encode(text) for text in PROMPTS[:8]]
    requests = [
        Request(prompt, Sampling(n=4, beam_search=BeamSearch(4), max_tokens=_BEAM_TOKENS))
        if index % 2
        else Request(prompt, Sampling(n=4, seed=index, temperature=0.8, max_tokens=_BEAM_TOKENS, ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]
    roomy = [answers(ask(bench.server, request)) for request in requests]
    with bench.start("--pool-size", "20MB") as server:
        results = ask_all(server, requests)
        left = left_behind(server)
    equal = [ours == answers(theirs) for ours, theirs in zip(roomy, results, strict=True)]
    recomputed = sum(result.usage.recomputed_tokens for result in results if result.usage)
    return Outcome(
        f"{sum(equal)} of {len(requests)} requests equal, {recomputed} tokens computed again{left}",
        "all, > 0",
        all(equal) and recomputed > 0 and not left,
    )


def as_much_is_saved_as_published(_: Workbench, ranges: list[Published]) -> Outcome:
    rows = [[measure(published, width) for width in published.saved] for published in ranges]
    saved = ", ".join(f"{row[0].dataset} {' and '.join(f'{each.saved:.1%}' for each in row)}" for row in rows)
    bounds = ", ".join(" and ".join(f"{bound:.1%}" for bound in published.saved.values()) for published in ranges)
    return Outcome(saved, f">= {bounds}", all(each.reaches_published for row in rows for each in row))


PROMISES = [
    Promise(
        "beam search of width 4 equals transformers' (24 prompts x 48 tokens)",
        partial(beams_equal_transformers, width=4),
    ),
    Promise(
        "beam search of width 8 equals transformers' (24 prompts x 48 tokens)",
        partial(beams_equal_transformers, width=8),
    ),
    Promise(
        "8 candidates compute and store a 512-token prompt once", partial(prompt_is_shared, num_prompt=512, copies=0)
    ),
    Promise(
        "8 candidates of a prompt that ends inside a block copy it 7 times",
        partial(prompt_is_shared, num_prompt=509, copies=7),
    ),
    Promise("seeded candidates differ, come again, and are unchanged by 31 others", candidates_are_their_own),
    Promise(
        "seeded answers at temperature 1 are unchanged by a warm prefix and by 23 others", drawn_tokens_outlast_rounding
    ),
    Promise("candidates and beams are unchanged by preemption in a tiny pool", unchanged_by_preemption),
    Promise(
        "2 and 6 candidates save as many blocks as in the PagedAttention paper (length traces)",
        partial(as_much_is_saved_as_published, ranges=[each for each in PUBLISHED if not each.as_beams]),
    ),
    Promise(
        "2 and 6 beams save as many blocks as in the PagedAttention paper (length traces)",
        partial(as_much_is_saved_as_published, ranges=[each for each in PUBLISHED if each.as_beams]),
    ),
    tested.promise(
        "fork, copy-on-write and partial reuse keep every invariant, in any order",
        "tests/property/test_pool_machine.py",
    ),
    tested.promise(
        "reported faults 20, 23, 24, 25, 26 and 29 do not occur",
        "tests",
        "-k",
        " or ".join(f"test_case_{case}_" for case in (20, 23, 24, 25, 26, 29)),
    ),
]
