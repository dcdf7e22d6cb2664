"""A run's checkpoint out to a folder, and a run that starts from that folder."""

from pathlib import Path

import jax
import numpy as np
import pytest

from holdfast.analysis.export import export_run
from holdfast.errors import ConfigError
from holdfast.models.pretrained import load_params, load_spec
from holdfast.training.run import write_run_files
from training import tiny

JOB = "gpt/train/pretrain"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A trainer whose initial state is saved, and the folder it was exported to."""
    folder = tmp_path_factory.mktemp("export")
    trainer = tiny.trainer(JOB, tiny.PRETRAIN, folder)
    write_run_files(trainer.resolved, trainer.spec.run_dir)
    trainer.save(Path("mine"))
    done = export_run(f"{trainer.spec.run_dir}@mine", folder / "out")
    assert (done.family, done.spec, done.step) == ("llama", trainer.resolved.model.options, 0)
    return trainer, folder / "out"


def test_the_folder_holds_the_run_bit_by_bit(exported):
    trainer, folder = exported
    assert load_spec(folder) == trainer.resolved.model.options
    params = load_params(folder, trainer.resolved.model.options, trainer.topology.mesh)
    jax.tree.map(np.testing.assert_array_equal, params, trainer.state.params)
    assert "checkpoint `mine`" in (folder / "README.md").read_text()


def test_a_run_starts_from_it_with_its_tokenizer(exported, tmp_path):
    trainer, folder = exported
    values = {**tiny.PRETRAIN, "architecture": {"block_size": 32, "from": str(folder)}}
    second = tiny.trainer(JOB, values, tmp_path, "training.seed=7")
    jax.tree.map(np.testing.assert_array_equal, second.state.params, trainer.state.params)
    assert second.resolved.tokenizer.fingerprint == trainer.resolved.tokenizer.fingerprint
    with pytest.raises(ConfigError, match="architecture/n_embd: got 64, expected 32"):
        tiny.trainer(JOB, values, tmp_path, "architecture.n_embd=64")
