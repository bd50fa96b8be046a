"""What `pagekeeper up` is told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pagekeeper.common.settings import Settings


class UpSettings(Settings):
    """Serve: run and supervise cache manager, runner and gateway. Their other settings: PAGEKEEPER_* variables."""

    runtime_dir: Path | None = Field(  # type: ignore[assignment]  # only here may it be left open
        None, description="Directory of the internal Unix sockets; unset: a fresh one, removed at the end."
    )
    model: Path | None = Field(None, description="Model directory or GGUF file; unset: the demo model.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: on a GPU if one can be used (see pagekeeper doctor)."
    )
    pool_size: str = Field("1GiB", description="Bytes of the KV cache, such as 512MiB or 4GiB.")
    pool_memory: str = Field("auto", description="How a GPU's pool is shared: cuda_ipc or cuda_vmm; auto: what works.")
    listen: str = Field("127.0.0.1:50051", description="Address of the gateway; port 0 takes any free one.")
    admin_listen: str = Field("127.0.0.1:50052", description="Address of the admin port; port 0 takes any free one.")
    standby: bool = Field(False, description="Keep a second runner ready, which takes over when the first one dies.")
    start_limit_s: float = Field(
        600.0, gt=0, description="Give up when it, or a replaced runner, does not serve after so many seconds."
    )
    hang_limit_s: float = Field(
        10.0, ge=0, description="Replace a process that leaves every question of so many seconds unanswered; 0: never."
    )
    grace_s: float = Field(30.0, ge=0, description="How long live requests may go on after SIGTERM, in seconds.")
