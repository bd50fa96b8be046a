"""What the cache manager is told."""

from pydantic import ByteSize, Field, field_validator

from pagekeeper.common.settings import Settings


class ManagerSettings(Settings):
    """The settings of the process; each is a flag, an environment variable and a key of the configuration file."""

    pool_size: ByteSize = Field(ByteSize(1 << 30), gt=0, lt=1 << 63, description="Memory for KV blocks, as in 8GiB.")
    admin_listen: str = Field("127.0.0.1:50052", description="HOST:PORT of statistics, audits and health; port 0: any.")
    watermark: float = Field(0.01, ge=0, lt=1, description="Share of the blocks that a new sequence must leave free.")
    preallocate: bool = Field(
        True, description="Take the pool's memory at start, so that too little of it is an error then and not later."
    )

    @field_validator("admin_listen")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT")
        return value
