"""Who is calling."""

from typing import Any, TypeAlias

import grpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""The context of any call."""


def tenant_of(context: Context) -> str:
    """The tenant behind a call: one for everybody, as there are no credentials yet.

    Never taken from the request's text: tenants must not be able to read each other's cache.
    """
    del context
    return "default"
