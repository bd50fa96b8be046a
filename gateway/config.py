"""What the gateway is told."""

from pathlib import Path

from pydantic import Field

from pagekeeper.common.settings import HostAndPort, Settings


class GatewaySettings(Settings):
    """Settings of the gateway process."""

    model: Path = Field(description="Model directory with tokenizer.json, or a GGUF file.")
    model_name: str = Field("", description="Name that clients use; default: the name of that directory or file.")
    listen: HostAndPort = Field("127.0.0.1:50051", description="HOST:PORT for clients; port 0 takes a free one.")
    max_concurrent: int = Field(
        256, ge=1, description="Sequences handed to runners at once: each candidate and each beam of a request is one."
    )
    max_queue: int = Field(1024, ge=0, description="Requests that may wait for that; one more is refused at once.")
    max_n: int = Field(16, ge=1, description="Most candidates that a request may ask for.")
    max_beam_width: int = Field(16, ge=1, description="Widest beam search that a request may ask for.")
    max_logprobs: int = Field(20, ge=0, description="Most alternatives to each token that a request may ask for.")
    max_logprob_values: int = Field(
        1_000_000,
        ge=0,
        description="Most log-probabilities of one request, all tokens and candidates; each takes up to 50 bytes.",
    )
    runner_wait_s: float = Field(60.0, gt=0, description="Longest time a request waits for a ready runner, in seconds.")
    grace_s: float = Field(30.0, ge=0, description="Time that running requests get to end at a drain, in seconds.")
    max_request_s: float = Field(0.0, ge=0, description="Longest time a request may take, in seconds; 0: no limit.")
    slow_reader_s: float = Field(
        60.0, gt=0, description="A client that leaves tokens unread for so many seconds is ended; it can resume."
    )
    slow_reader_tokens: int = Field(
        1024, ge=0, description="While its answer is being made, only if more than so many tokens wait for it."
    )
