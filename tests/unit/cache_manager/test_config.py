import subprocess
import sys

import pytest

from cache_manager.config import ManagerSettings
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.settings import load_settings


def test_sizes_are_written_as_people_write_them() -> None:
    assert load_settings(ManagerSettings, ["--pool-size", "512MiB"]).pool_size == 512 << 20
    assert load_settings(ManagerSettings, []).pool_size == 1 << 30


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--pool-size", "much"], "pool_size"),
        (["--pool-size", "0"], "pool_size"),
        (["--admin-listen", "50052"], "admin_listen"),
        (["--admin-listen", "localhost:http"], "admin_listen"),
        (["--admin-listen", "localhost:65536"], "admin_listen"),
        (["--watermark", "1"], "watermark"),
        (["--watermark", "nan"], "watermark"),
        (["--device", "gpu"], "device"),
        (["--gpu", "-1"], "gpu"),
        (["--pool-memory", "vram"], "pool_memory"),
    ],
)
def test_a_wrong_setting_is_named(flags: list[str], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: "):
        load_settings(ManagerSettings, flags)


def test_the_cache_manager_needs_no_torch() -> None:
    program = "import sys, cache_manager.__main__, cache_manager.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
