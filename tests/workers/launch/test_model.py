import json
from pathlib import Path

import pytest

from workers.launch.model import local_model


def directory(path: Path, config: object, *files: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).write_bytes(b"")
    return path


def test_a_directory_without_weights_is_served_with_random_ones(tmp_path: Path) -> None:
    model = local_model(str(directory(tmp_path / "m", {"max_position_embeddings": 512})), tmp_path)
    assert (model.load_format, model.offline, model.name, model.max_positions) == ("dummy", True, "m", 512)


def test_weights_are_loaded_when_there_are_some(tmp_path: Path) -> None:
    made = directory(tmp_path / "m", {}, "model-00001-of-00001.safetensors")
    assert local_model(str(made), tmp_path).load_format == "auto"


def test_positions_of_a_multimodal_config_are_those_of_its_text_part(tmp_path: Path) -> None:
    made = directory(tmp_path / "m", {"text_config": {"max_position_embeddings": 77}})
    assert local_model(str(made), tmp_path).max_positions == 77


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "a/b/c"])
def test_a_path_that_is_not_there_is_an_error_not_a_hub_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        local_model(name, tmp_path)


def test_a_path_of_another_machine_is_taken_as_it_is_where_the_command_is_for_there(tmp_path: Path) -> None:
    model = local_model("/models/name", tmp_path, elsewhere=True)
    assert (model.path, model.name, model.offline, model.max_positions) == ("/models/name", "name", True, 0)
    with pytest.raises(FileNotFoundError):
        local_model("./name", tmp_path, elsewhere=True)


def test_a_hub_name_is_left_to_vllm(tmp_path: Path) -> None:
    model = local_model("owner/name", tmp_path)
    assert (model.path, model.offline, model.load_format) == ("owner/name", False, "auto")


def test_a_directory_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a model directory"):
        local_model(str(tmp_path), tmp_path)


def test_no_name_makes_the_tiny_model(tmp_path: Path) -> None:
    model = local_model("", tmp_path)
    assert model.name == "moongate-tiny"
    assert Path(model.path, "tokenizer.json").exists()
