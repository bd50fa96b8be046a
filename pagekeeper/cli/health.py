"""`pagekeeper health`: for people, and for the health checks of containers."""

from typing import Annotated

import typer

from pagekeeper.common.errors import UnavailableError

GATEWAY = "127.0.0.1:50051"


def health(
    server: Annotated[str, typer.Option(help="Address of a gateway or of an admin port.")] = GATEWAY,
    service: Annotated[str, typer.Option(help="One service; pagekeeper.v1.RunnerService: is no runner missing?")] = "",
) -> None:
    """Exit 0 if a server can serve, else 1 or 3."""
    from pagekeeper.client import Client

    with Client(server) as client:
        if not client.health(service):
            raise UnavailableError(f"{server} answers but {service or 'it'} is not SERVING now; its log says why")
    print("SERVING")
