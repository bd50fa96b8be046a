"""From a request message to what is asked of a runner, and to the state in which its answer begins."""

import asyncio
import functools
import secrets
import uuid
from collections.abc import Iterable

from gateway.generation import ResolvedRequest
from gateway.messages import Messages
from gateway.model import ServedModel
from gateway.sampling import Caps, check_bans
from gateway.validation import Limits, Prompt, ValidRequest, check_parameters, fit, validate
from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.v1 import generate_pb2

# Longer texts are tokenised on a thread (the library lets other threads run meanwhile): a megabyte takes a second,
# and every stream and every ping shares the event loop.
_LONG_TEXT = 16 * 1024
# What a JSON reader that keeps numbers as doubles can give back.
_SEED_BITS = 53


class Resolver:
    """Checks requests and fills in what they leave open.

    Args:
        model: the one that is served.
        caps: the most that a request may ask for.
    """

    def __init__(self, model: ServedModel, caps: Caps) -> None:
        self._model = model
        self._caps = caps

    def check_parameters(self, request: generate_pb2.GenerateRequest) -> None:
        """Raise RequestError for what is wrong whatever the model can take."""
        check_parameters(request, self._model.name, self._model.defaults, self._caps)

    async def resolve(
        self, request: generate_pb2.GenerateRequest, tenant: str, limits: Limits
    ) -> tuple[ValidRequest, ResolvedRequest]:
        """Check the request, make its prompt tokens, and fill in what it leaves open.

        Raises:
            RequestError: something is wrong with it.
        """
        model = self._model
        valid = validate(request, model.name, model.defaults, self._caps, limits, model.tokenizer.longest_token)
        prompt = await self.tokenize(valid.prompt) + (valid.branch or [])
        max_tokens = fit(valid, prompt, limits, self._caps)
        sampling = valid.sampling
        bad_words = self._bad_words(sampling.bad_words)
        stop_token_ids = (
            sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | model.end_token_ids
        )
        check_bans(sampling, bad_words, stop_token_ids, limits.vocab_size)
        resolved = ResolvedRequest(
            request_id=valid.request_id or uuid.uuid4().hex,
            tenant=tenant,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            bad_words=bad_words,
            priority=valid.priority,
            is_resumed=bool(valid.ended) or any((valid.resumed or {}).values()),
        )
        return valid, resolved

    async def messages(self, valid: ValidRequest, request: ResolvedRequest) -> Messages:
        """The messages of its answer, with what the first one says of the prompt."""
        first = generate_pb2.GenerateResponse(request_id=request.request_id, seed=request.seed)
        detokenizer = self._model.tokenizer.detokenizer()
        branch_text = detokenizer.push(valid.branch or [])
        if not request.is_resumed:
            if valid.branch is not None:
                first.branch_text = branch_text
            if valid.sampling.echo:
                first.prompt.token_ids.extend(request.prompt_token_ids)
                first.prompt.text = await self.decode(request.prompt_token_ids)
        return Messages(request, detokenizer, first)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: the model's chat template refuses it.
        """
        tokenizer = self._model.tokenizer
        match prompt:
            case str():
                length, encode = len(prompt), functools.partial(tokenizer.encode, prompt)
            case tuple():
                length = sum(len(turn.role) + len(turn.content) for turn in prompt)
                encode = functools.partial(tokenizer.encode_chat, prompt)
            case _:
                return prompt
        return await asyncio.to_thread(encode) if length > _LONG_TEXT else encode()

    async def decode(self, token_ids: list[int]) -> str:
        """The text that an answer with these tokens has."""
        decode = self._model.tokenizer.decode
        return await asyncio.to_thread(decode, token_ids) if len(token_ids) > _LONG_TEXT else decode(token_ids)

    def _bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """The token sequences of all words."""
        sequences = []
        for index, word in enumerate(words):
            found = self._model.tokenizer.word_token_ids(word)
            if not found:
                raise InvalidRequestError(FieldViolation(f"sampling.bad_words[{index}]", "the word has no tokens"))
            sequences += found
        return sequences
