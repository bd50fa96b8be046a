"""Configuration: flags over PAGEKEEPER_* environment over the file named by PAGEKEEPER_CONFIG_FILE (TOML).

A process describes its settings once, as a class; its flags, variables and file keys all follow from the fields.
Settings are frozen, validated at start, and read only in `__main__`. The file serves all processes, so it may hold the
settings of any of them; a flag has to be one of this process.
"""

import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.names import PREFIX, SETTINGS, nearest


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return value


HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
"""An address to listen on."""


def _default_runtime_dir() -> Path:
    """A path of this user's own; /tmp is everybody's."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    return Path(own) / "pagekeeper" if own else Path(tempfile.gettempdir()) / f"pagekeeper-{os.getuid()}"


class Settings(BaseSettings):
    """What every process is told."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
    )

    runtime_dir: Path = Field(
        default_factory=_default_runtime_dir,
        description="Directory of the internal Unix sockets; mode 0700, path under 100 bytes.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then the file."""
        del dotenv_settings, file_secret_settings
        file = os.environ.get("PAGEKEEPER_CONFIG_FILE")
        sources = (init_settings, env_settings)
        if not file:
            return sources
        if not Path(file).is_file():
            raise ConfigurationError(f"PAGEKEEPER_CONFIG_FILE: there is no file {file}")
        source = TomlConfigSettingsSource(settings_cls, Path(file))
        for key in source.toml_data:
            if key not in SETTINGS:
                raise ConfigurationError(f"PAGEKEEPER_CONFIG_FILE: {key} is no setting{nearest(key, SETTINGS)}")
        return (*sources, source)


S = TypeVar("S", bound=Settings)


def load_settings(cls: type[S], args: list[str] | None = None) -> S:
    """Read the settings of a process from its flags, environment and file.

    Raises:
        ConfigurationError: a value is missing or wrong, or a name is unknown; the message is one line and names it.
    """
    args = sys.argv[1:] if args is None else args
    try:
        return CliApp.run(cls, cli_args=args, cli_exit_on_error=False)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise ConfigurationError(f"{name}: {first['msg']}") from error
    except SettingsError as error:
        message = str(error).splitlines()[0].removeprefix("error parsing CLI: ")
        raise ConfigurationError(_unknown_flag(cls, args) or message) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"PAGEKEEPER_CONFIG_FILE: {error}") from error


def _unknown_flag(cls: type[Settings], args: list[str]) -> str | None:
    """What to say of the first flag that is none of this process, if there is one."""
    fields = {name.replace("_", "-"): field for name, field in cls.model_fields.items()}
    known = [f"--{name}" for name in fields]
    known += [f"--no-{name}" for name, field in fields.items() if field.annotation is bool]
    for arg in args:
        flag = arg.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            return f"{flag} is no flag{nearest(flag, known)}"
    return None
