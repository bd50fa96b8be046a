"""From settings to a model that can run: device, kernels, weights and layout of the pool, which must fit together."""

import functools
from dataclasses import dataclass

import torch

from cache_manager.client import Fingerprint
from cache_manager.memory.cuda_driver import CudaDriver
from cache_manager.memory.cupy_driver import load_cuda_driver
from kernels.interface import AttentionBatch, AttentionParams, Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.select import resolve_kernels, select_kernels
from model_runner.choose_device import choose_device
from model_runner.config import RunnerSettings
from model_runner.device import CpuDevice, Device
from model_runner.model.load import LoadedModel, load_decoder
from pagekeeper.common.errors import ConfigurationError


@dataclass(frozen=True)
class Loaded:
    """The model on its device, with all that works on it."""

    model: LoadedModel
    kernels: Kernels
    layout: KvLayout
    device: torch.device
    cuda: CudaDriver | None
    """Maps the pool, of a GPU; None on the CPU."""
    why_not_gpu: str | None
    """What kept "auto" from the GPU."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What two runners that share blocks have in common."""
        model = self.model
        return Fingerprint(model.config_digest.hex(), model.weights_digest.hex(), model.compute_dtype)

    def open_device(self, settings: RunnerSettings, max_context_length: int) -> Device:
        """The device as the engine sees it."""
        if self.device.type == "cpu":
            return CpuDevice(self.model.decoder, self.kernels, self.layout)
        from model_runner.cuda.device import CudaDevice, DeviceLimits
        from model_runner.cuda.queue import TorchQueue

        limits = DeviceLimits(settings.max_batch_tokens, settings.max_sequences, max_context_length)
        return CudaDevice(self.model.decoder, self.kernels, self.layout, limits, TorchQueue(self.device))


def load(settings: RunnerSettings) -> Loaded:
    """Load the model onto its device and kernels.

    Raises:
        ConfigurationError: a setting, the model or the machine does not allow it.
    """
    device, obstacle = choose_device(settings.device, settings.gpu)
    cuda = load_cuda_driver(settings.gpu) if device.type == "cuda" else None
    try:
        kernels = select_kernels(resolve_kernels(settings.kernels, device.type))
        model = load_decoder(settings.model, kernels, device=device)
        layout = model.kv_layout(settings.block_size, settings.kv_dtype)
        check_kernels(kernels, layout, device)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise ConfigurationError("device: the GPU's memory does not hold the weights; lower --pool-size") from error
    return Loaded(model, kernels, layout, device, cuda, obstacle)


def check_kernels(kernels: Kernels, layout: KvLayout, device: torch.device) -> None:
    """Check that `kernels` can work with a pool of this layout.

    Raises:
        ValueError: they cannot.
    """
    pool = KvPool.over(torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device), layout, 1)
    ints = functools.partial(torch.zeros, dtype=torch.int64, device=device)
    batch = AttentionBatch(
        slot_mapping=ints(1),
        block_tables=ints(1, 1),
        query_starts=torch.arange(2, device=device),
        context_ends=torch.ones(1, dtype=torch.int64, device=device),
        query_lengths=[1],
        context_lengths=[1],
        num_decodes=1,
    )
    kernels.prepare_attention(batch, pool, AttentionParams(scale=1.0))
