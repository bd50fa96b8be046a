"""Settings of a model runner."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pagekeeper.common.settings import Settings


class RunnerSettings(Settings):
    """Settings of `python -m model_runner`; each is a flag, a PAGEKEEPER_* variable and a key of the file."""

    model: Path = Field(description="Directory with config.json and weights (safetensors or GGUF), or a GGUF file.")
    model_name: str = Field("", description="Name that clients use; the directory's name when empty.")
    name: str = Field("0", pattern=r"^[a-z0-9-]{1,16}$", description="Names this runner's socket: runner-NAME.sock.")
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="What the gateway gives it if it can choose: prompts, what follows a first token, or both."
    )
    standby: bool = Field(False, description="Be ready, and get requests only while no other runner is.")
    replace: bool = Field(
        False, description="Get ready beside the runner of the same name, then take its place and its streams."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    gpu: int = Field(0, ge=0, description="Which GPU, as this process counts from 0.")
    kernels: Literal["auto", "reference", "cpu", "triton", "triton-interpret"] = Field(
        "auto", description="Kernel backend; auto follows the device, triton-interpret is for tests."
    )
    kv_dtype: Literal["auto", "float8_e4m3fn"] = Field(
        "auto", description="How K and V are stored; auto: as they are computed. 8 bits hold twice as many tokens."
    )
    block_size: int = Field(16, description="Tokens a KV block: a power of two from 8 to 128.")
    max_batch_tokens: int = Field(512, ge=1, description="Token budget of a step; a longer prompt takes several steps.")
    max_sequences: int = Field(64, ge=1, description="Most sequences that run at once.")
    max_context_length: int | None = Field(
        None, ge=2, description="Most tokens of prompt and answer together; unset: what the model and the pool allow."
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: one for each core.")
    manager_wait_s: float = Field(
        60.0, gt=0, description="How long to wait for a cache manager, at start and after each loss, in seconds."
    )
    grace_s: float = Field(30.0, ge=0, description="How long live requests may go on after SIGTERM, in seconds.")
