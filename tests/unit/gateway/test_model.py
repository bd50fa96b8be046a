"""What the gateway reads of a model directory, and of its settings."""

import json
from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from gateway.model import load_model
from gateway.text.tokenizer import ChatTurn
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.settings import load_settings
from tests.fakes.tokenizer import END_ID, END_OF_TURN_ID, write_model_directory


def test_a_directory_gives_a_name_a_tokenizer_defaults_and_end_tokens(tmp_path: Path) -> None:
    generation_config = {"temperature": 0.2, "top_k": 50, "top_p": None, "max_new_tokens": 32, "eos_token_id": [END_ID]}
    model = load_model(write_model_directory(tmp_path / "tiny", generation_config=generation_config))
    assert model.name == "tiny"
    assert (model.defaults.temperature, model.defaults.top_k, model.defaults.top_p) == (0.2, 50, 1.0)
    assert model.defaults.max_tokens == 32
    assert model.end_token_ids == {END_ID, END_OF_TURN_ID}


def test_end_tokens_of_config_json_count_where_generation_config_is_silent(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "tiny")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    assert load_model(directory).end_token_ids == {END_ID, END_OF_TURN_ID}


def test_an_end_token_may_stand_in_the_models_padding(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "tiny")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 500, "vocab_size": 512}))
    assert 500 in load_model(directory).end_token_ids


def test_a_template_in_its_own_file_comes_first_and_special_tokens_may_be_objects(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "tiny")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": {"content": "B"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}o"}]}
        )
    )
    tokenizer = load_model(directory).tokenizer
    assert tokenizer.decode(tokenizer.encode_chat((ChatTurn("user", ""),))) == "Bo"
    (directory / "chat_template.jinja").write_text("{{ bos_token }}file")
    tokenizer = load_model(directory).tokenizer
    assert tokenizer.decode(tokenizer.encode_chat((ChatTurn("user", ""),))) == "Bfile"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("generation_config.json", '{"temperature": -1}', "generation_config.json: temperature"),
        ("generation_config.json", '{"top_p": "high"}', "generation_config.json"),
        ("generation_config.json", '{"top_k": 50.5}', "generation_config.json: top_k: 50.5 is not a whole number"),
        ("generation_config.json", '{"top_k": true}', "generation_config.json: top_k"),
        ("generation_config.json", '{"top_k": 4294967296}', "generation_config.json: top_k"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id: -1 is not a token id"),
        ("generation_config.json", '{"eos_token_id": 4294967296}', "eos_token_id: 4294967296 is not a token id"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id: '2' is not a token id"),
        ("config.json", '{"eos_token_id": [[2]]}', "eos_token_id"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_a_wrong_file_is_named_on_one_line(tmp_path: Path, file: str, content: str, message: str) -> None:
    directory = write_model_directory(tmp_path / "tiny")
    (directory / file).write_text(content)
    with pytest.raises(ConfigurationError, match=message) as error:
        load_model(directory)
    assert "\n" not in str(error.value)


def test_a_missing_directory_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"holds no tokenizer\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("listen", ["50051", ":50051", "host:", "host:port", "host:70000"])
def test_an_address_is_a_host_and_a_port(listen: str) -> None:
    with pytest.raises(ConfigurationError, match="listen"):
        load_settings(GatewaySettings, ["--model", "m", "--listen", listen])
