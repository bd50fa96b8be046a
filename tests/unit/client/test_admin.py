"""The client of the admin port."""

import pytest
from typer.testing import CliRunner

from pagekeeper.cli.main import app
from pagekeeper.client import AdminClient
from pagekeeper.common.errors import ConfigurationError

SEVERAL = "127.0.0.1:1, unix:/run/admin"


def test_an_admin_port_has_one_address() -> None:
    with pytest.raises(ConfigurationError, match=r"^server: 2 addresses"):
        AdminClient(SEVERAL)
    AdminClient("127.0.0.1:1").close()


def test_stats_of_several_servers_are_refused() -> None:
    result = CliRunner().invoke(app, ["stats", "--server", SEVERAL])
    assert isinstance(result.exception, ConfigurationError)
