"""What tests of whole runs share."""

from typing import Any

import pytest

from training.tiny import continual


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted continual run."""
    trainer = continual(tmp_path_factory.mktemp("whole"), "eval.probe_interval=2", "eval.probe_window=2")
    trainer.run()
    return trainer
