"""A checkpoint of any plan writes text in one process; another model's is refused."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from training_runs import LLAMA, OPTIONS, V3, plan, run

from dualpipe_lab import models, train
from dualpipe_lab.dp.checkpoint import CheckpointError
from dualpipe_lab.dp.checkpoint.reader import checksum_of

PROMPT, SEED = "A rank ", 3
CASES = [
    (replace(LLAMA, tied=True, qk_norm=True), plan(dp=2, zero=3)),
    (V3, plan(ep=2)),
]


@pytest.mark.parametrize(("config", "chosen"), CASES, ids=str)
def test_a_checkpoint_alone_writes_what_its_model_says(tmp_path, config, chosen):
    """With routers whose biases have moved, drawn and likeliest bytes, and a text longer than a sequence."""
    written = run(config, chosen, folder=tmp_path, steps=2)
    model, text = train.read_model(tmp_path), list(PROMPT.encode())
    assert all(torch.equal(tensor, written.weights()[name]) for name, tensor in model.named_parameters())
    with torch.no_grad():
        for _ in range(12):
            text.append(int(model(torch.tensor([text[-16:]]))[0, -1].argmax()))
    assert train.generate(tmp_path, PROMPT, 12) == bytes(text).decode(errors="replace")
    drawn = [train.generate(path, PROMPT, 12, 0.5, SEED) for path in (tmp_path, str(written.checkpoint))]
    assert drawn[0] == drawn[1] != train.generate(tmp_path, PROMPT, 12, 0.5, SEED + 1)
    if config is V3:
        assert all(float(buffer.abs().max()) > 0 for buffer in model.buffers()), "biases move, and are read"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return run(LLAMA, plan(), steps=1, folder=folder).checkpoint


REFUSED = [
    ({"prompt": ""}, "at least 1 byte"),
    ({"sequence_length": 0}, "counts from 1, got 0"),
    ({"source": "/nowhere"}, "no checkpoint in /nowhere"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_written_is_refused_before_any_work(saved, monkeypatch, change, message):
    monkeypatch.setattr(models.PlainLlama, "forward", None)
    given = {"source": saved, "prompt": PROMPT, "num_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        train.generate(**given)


def changed(saved, folder, **values):
    """A copy of a checkpoint with other values than tensors."""
    shutil.copytree(saved, folder / saved.name)
    index = json.loads((saved / "index.json").read_text())
    index["values"] |= values
    index["values_checksum"] = checksum_of(index["values"])
    (folder / saved.name / "index.json").write_text(json.dumps(index))
    return folder


def test_a_checkpoint_says_its_sequence_length_and_its_model(saved, tmp_path):
    silent = changed(saved, tmp_path / "length", sampler=None)
    length = OPTIONS["sequence_length"]
    assert train.generate(silent, PROMPT, 5, sequence_length=length) == train.generate(saved, PROMPT, 5)
    with pytest.raises(ValueError, match="does not say how long its sequences were; give sequence_length="):
        train.generate(silent, PROMPT, 5)
    with pytest.raises(CheckpointError, match="does not say of which model it is"):
        train.generate(changed(saved, tmp_path / "model", config=None), PROMPT, 5)
    for number, (other, message) in enumerate(
        [
            (replace(LLAMA, vocabulary_size=300), r"shape \(256, 16\), the model's has \(300, 16\)"),
            (replace(LLAMA, num_layers=3), "has tensor parameter/layers.3.* the model has not"),
            (replace(LLAMA, num_layers=5), "has no tensor parameter/layers.4"),
        ]
    ):
        config = {"model": "LlamaConfig", "config": asdict(other)}
        with pytest.raises(CheckpointError, match=f"{message}.*another model"):
            train.read_model(changed(saved, tmp_path / str(number), config=config))
