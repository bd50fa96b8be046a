"""A gateway as a process of its own."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def started(
    runtime_dir: Path, model: Path, listen: str = "127.0.0.1:0", **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway process and the address in its line `ready`."""
    flags = ("--runtime-dir", str(runtime_dir), "--model", str(model), "--listen", listen)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=dict(os.environ) | environment,
    )
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        yield process, event["listen"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
