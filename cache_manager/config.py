"""What the cache manager is told."""

from pydantic import ByteSize, Field

from pagekeeper.common.settings import HostAndPort, Settings


class ManagerSettings(Settings):
    """The settings of the process; each is a flag, an environment variable and a key of the configuration file."""

    pool_size: ByteSize = Field(ByteSize(1 << 30), gt=0, lt=1 << 63, description="Memory for KV blocks, as in 8GiB.")
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
        True, description="Take the pool's memory at start, so that too little of it is an error then and not later."
    )
