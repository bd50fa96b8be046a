"""How this runner finds its cache manager, at start and after each loss."""

import threading
import time

from cache_manager.client import CacheClient, CacheConnectionLost, Exchange
from model_runner.config import RunnerSettings
from model_runner.loading import Loaded
from model_runner.submission import RequestLimits
from pagekeeper.common.errors import ConfigurationError, UnavailableError
from pagekeeper.common.sockets import RuntimeDir

_ATTEMPT_S = 2.0


class Manager:
    """Opens sessions, with what never changes over a runner's life.

    Args:
        settings: of this process.
        runner_id: for people.
        loaded: the model.

    Attributes:
        stopping: to be set when nobody needs a session any more.
    """

    def __init__(self, settings: RunnerSettings, runner_id: str, loaded: Loaded) -> None:
        self._settings = settings
        self._runtime_dir = RuntimeDir(settings.runtime_dir)
        self._runner_id = runner_id
        self._loaded = loaded
        self._first: Exchange | None = None
        self._promised_blocks = 0
        self.stopping = threading.Event()

    def promise(self) -> RequestLimits:
        """What a request must keep to from now on, by the pool of the first manager that comes.

        Raises:
            CacheConnectionLost: none came in time.
            ConfigurationError: the manager refuses this model or layout, or its pool is too small for any sequence.
        """
        exchange = self._attach()
        granted, settings, config = exchange.granted, self._settings, self._loaded.model.config
        num_blocks = self._promised_blocks = granted.num_blocks - 1 - granted.watermark_blocks
        fits = num_blocks * settings.block_size
        longest = min(fits, config.max_position_embeddings, settings.max_context_length or fits)
        if longest < 2:
            raise ConfigurationError(
                f"pool_size: {granted.num_blocks} blocks of {granted.block_bytes} bytes hold no sequence; raise "
                "--pool-size"
            )
        self._first = exchange
        return RequestLimits(config.vocab_size, longest, settings.block_size, num_blocks, settings.max_sequences)

    def connect(self) -> Exchange:
        """Begin a session that has room for what was promised; the caller closes it.

        Raises:
            CacheConnectionLost: no manager came in time, or nobody needs a session any more.
            ConfigurationError: the manager refuses this model or layout.
            UnavailableError: it has less room than the first one. Whoever was admitted might then never fit; the next
                runner announces what it can serve, and refuses the rest.
        """
        if self._first is not None:
            # Nobody else may keep its pool mapped.
            first, self._first = self._first, None
            return first
        exchange = self._attach()
        if exchange.granted.num_blocks - 1 - exchange.granted.watermark_blocks < self._promised_blocks:
            raise UnavailableError("pool_size: the new cache manager's pool holds less; start this runner again")
        return exchange

    def _attach(self) -> Exchange:
        loaded = self._loaded
        deadline = time.monotonic() + self._settings.manager_wait_s
        while True:
            try:
                return CacheClient.connect(
                    self._runtime_dir, self._runner_id, loaded.layout, loaded.fingerprint, _ATTEMPT_S, loaded.cuda
                )
            except CacheConnectionLost:
                if time.monotonic() > deadline or self.stopping.is_set():
                    raise
