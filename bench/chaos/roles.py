"""Two runners with roles: one computes the prompt, the other the answer, for which it opens the same tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.campaign import Setting
from bench.chaos.observer import Observer
from bench.chaos.stack import Stack
from bench.chaos.stock import settle
from bench.chaos.waiting import until
from bench.promise import Outcome
from bench.prompts import PASSAGE
from pagekeeper.client import AsyncClient

PROMPT_TOKENS = 512
_ANSWER_TOKENS = 48
_MIDWAY = 8
_TEXTS = ("The keeper", "A boat in the fog", "The last winter", "What the book says")


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, those computed again by its usage, and which runners had a sequence in its midst."""

    token_ids: list[int]
    recomputed_tokens: int
    runners: set[str]


def measure(setting: Setting) -> Outcome:
    """Ask one runner for both, then two with roles that find nothing in the cache, and compare."""
    prompts = [setting.reference.encode(f"{text}. {PASSAGE * 20}")[:PROMPT_TOKENS] for text in _TEXTS]
    return asyncio.run(_measure(setting, prompts))


async def _measure(setting: Setting, prompts: Sequence[Sequence[int]]) -> Outcome:
    log = setting.folder / "roles.log"
    async with Stack(setting.model, setting.pool_size, log, setting.environment) as stack:
        for name in ("manager", "gateway", "runner"):
            await stack.start(name)
        for name in ("manager", "gateway"):
            await stack.until_ready(name)
        observer = Observer(stack.gateway, stack.admin)
        async with AsyncClient(stack.gateway) as client:
            alone = [await _ask(client, prompt, observer) for prompt in prompts]
            await stack.kill("runner")
            await observer.flush()
            for role in ("prefill", "decode"):
                await stack.start(role, "--role", role)

            async def both_met() -> bool:
                return stack.met >= {"prefill", "decode"}

            await until(both_met, "the gateway knows both runners")
            before = await observer.opens()
            apart = [await _ask(client, prompt, observer) for prompt in prompts]
            opens = await observer.opens() - before
            block_size = (await observer.stats())["pool"]["block_size"]
        left = await settle(observer)
        codes = await stack.stop()
    most = max(answer.recomputed_tokens for answer in apart)
    moved = sum(answer.runners == {"decode"} for answer in apart)
    partings = [
        setting.reference.gap_where_they_part(list(prompt), one.token_ids, other.token_ids)
        for prompt, one, other in zip(prompts, alone, apart, strict=True)
    ]
    equal = partings.count(None)
    left += [f"exit codes {codes}"] if any(codes.values()) else []
    return Outcome(
        f"{moved} of {len(prompts)} prompts of {PROMPT_TOKENS} tokens moved, {equal} answers equal, "
        f"at most {most} tokens computed again{''.join(f', {what}' for what in left)}",
        f"all, all or near-ties, <= {block_size}",
        moved == opens.reopens == len(prompts)
        and all(parting is None or parting.is_near_tie for parting in partings)
        and most <= block_size
        and not left,
    )


async def _ask(client: AsyncClient, prompt: Sequence[int], observer: Observer) -> Answer:
    token_ids: list[int] = []
    runners: set[str] = set()
    answer = client.generate(prompt, temperature=0.0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    async for delta in answer:
        token_ids += delta.token_ids
        if not runners and len(token_ids) >= _MIDWAY:
            runners = {runner.name for runner in await observer.runners() if runner.num_sequences}
    if answer.usage is None:
        raise RuntimeError("an answer without usage")
    return Answer(token_ids, answer.usage.recomputed_tokens, runners)
