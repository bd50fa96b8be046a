"""What the cache manager is told."""

from pydantic import ByteSize, Field

from cache_manager.memory.choose import Device, Wanted
from pagekeeper.common.settings import HostAndPort, Settings


class ManagerSettings(Settings):
    """The settings of the process; each is a flag, an environment variable and a key of the configuration file."""

    pool_size: ByteSize = Field(ByteSize(1 << 30), gt=0, lt=1 << 63, description="Memory for KV blocks, as in 8GiB.")
    device: Device = Field(
        "auto", description="Where the model runs, and with it the pool; auto: on a GPU if one can be used."
    )
    gpu: int = Field(0, ge=0, description="Which GPU, as this process counts from 0.")
    pool_memory: Wanted = Field(
        "auto",
        description="What the pool is: memfd (CPU), cuda_ipc or cuda_vmm (GPU). auto: on a GPU cuda_ipc, and cuda_vmm "
        "where that does not work, as between containers that do not share a PID namespace.",
    )
    admin_listen: HostAndPort = Field(
        "127.0.0.1:50052", description="HOST:PORT of statistics, audits and health; port 0: any."
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="Share of the blocks that a new sequence must leave free.")
    settle_s: float = Field(
        2.0,
        ge=0,
        description="Seconds that a dead runner's work on a GPU may outlive its process; not measured yet.",
    )
    preallocate: bool = Field(
        True,
        description="Take a CPU's pool at start, so that too little memory is an error then and not later. A GPU's "
        "always is.",
    )
