"""Clients of the gateway, and of the cache manager's admin port.

    from pagekeeper import Client, Message

    with Client("127.0.0.1:50051") as client:
        question = [Message("user", "What is the capital of France?")]
        print(client.generate(question, temperature=0).text())

        answer = client.generate(question, temperature=0, timeout_s=30)
        for delta in answer:
            print(delta.text, end="", flush=True)
        print(answer.usage)

    async with AsyncClient("127.0.0.1:50051") as client:
        async for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

`AsyncClient` has the methods of `Client`, to be awaited, and one connection carries any number of streams. A `Client`
may be used from several threads, each answer from one at a time; an `AsyncClient` from all tasks of one event loop.

A request ends at the server, which gives its blocks back, when its answer is closed: by `close()`, by leaving a `with`
block over it or a loop over it, or by dropping the last reference to it.

A call whose connection is lost is made again, for up to a minute, and an answer goes on where it was: its reader sees a
pause. Several gateways of the same runners can stand in for each other:

    client = Client("127.0.0.1:50051,127.0.0.1:50061")

Every failure is one of pagekeeper.common.errors, named by who must act: TryAgainError and RequestError are the two
that programs tell apart. An answer that has failed for good can still be continued later, also by another program:

    answer = client.generate(prompt, request_id=answer.request_id, resume=answer.received)

An answer can also be continued in another way from any of its tokens on, while it grows or afterwards:

    other = answer.branch(10, temperature=1.2, n=4)
"""

from pagekeeper.client.admin import AdminClient
from pagekeeper.client.aio import AsyncAnswer, AsyncClient
from pagekeeper.client.sync import Answer, Client
from pagekeeper.client.values import (
    Beam,
    BeamSearch,
    Candidate,
    Delta,
    GivenPrompt,
    Message,
    ModelInfo,
    Prompt,
    Resume,
    Sampling,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "AdminClient",
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "Beam",
    "BeamSearch",
    "Candidate",
    "Client",
    "Delta",
    "GivenPrompt",
    "Message",
    "ModelInfo",
    "Prompt",
    "Resume",
    "Sampling",
    "TokenLogprobs",
    "Usage",
]
