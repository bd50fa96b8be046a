"""A device whose steps take as long as a test wants."""

import threading

from kernels.kv_layout import KvLayout
from kernels.select import select_kernels
from model_runner.device import CpuDevice, CpuFlight
from model_runner.inputs import StepInputs
from model_runner.model.load import LoadedModel


class SlowDevice(CpuDevice):
    """Steps that are launched wait while it is held."""

    def __init__(self, model: LoadedModel, layout: KvLayout) -> None:
        super().__init__(model.decoder, select_kernels("cpu"), layout)
        self._may_run = threading.Event()
        self._waits = threading.Event()
        self.go_on()

    def hold(self) -> None:
        """Returns once a step has been launched that waits."""
        self._waits.clear()
        self._may_run.clear()
        assert self._waits.wait(30)

    def go_on(self) -> None:
        self._may_run.set()

    def launch(self, inputs: StepInputs) -> CpuFlight:
        self._thread.submit(self._delay)
        return super().launch(inputs)

    def _delay(self) -> None:
        if not self._may_run.is_set():
            self._waits.set()
            self._may_run.wait()
