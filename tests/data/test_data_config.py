"""Where data and cache are looked for: the config, then the environment, then the user's own folders."""

from pathlib import Path

import pytest

from holdfast.config import build, configure, merge
from holdfast.data.config import DataConfig, SourceConfig, TokenizerConfig
from holdfast.errors import ConfigError


def test_the_config_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_DATA", "HOLDFAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert DataConfig().root_path() is None
    assert DataConfig().cache_path() == Path("/somewhere/.cache/holdfast")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert DataConfig().cache_path() == Path("/caches/holdfast")
    monkeypatch.setenv("HOLDFAST_CACHE", "/mine")
    monkeypatch.setenv("HOLDFAST_DATA", "~/data")
    assert DataConfig().cache_path() == Path("/mine")
    assert DataConfig().root_path() == Path("/somewhere/data")
    both = DataConfig(root="a", cache="b")
    assert (both.root_path(), both.cache_path()) == (Path("a"), Path("b"))


def test_defaults_and_sources_come_from_a_tree() -> None:
    tree = build(DataConfig, TokenizerConfig)
    assert configure(TokenizerConfig, tree).name == "bytes"
    assert configure(DataConfig, tree) == DataConfig()
    values = {"data": {"sources": {"mine": {"path": "x.jsonl", "prompt": "{q}", "labels": {0: "no", 1: "yes"}}}}}
    found = configure(DataConfig, merge([DataConfig], values)).sources["mine"]
    assert found == SourceConfig("x.jsonl", prompt="{q}", labels={"0": "no", "1": "yes"})


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("data.max_broken=2", "data/max_broken"),
        ("data.workers=-1", "data/workers"),
        ("data.loss_on=prompt", "data/loss_on"),
        ("data.validation_fraction=0", "data/validation_fraction"),
        ("data.max_tokens=0", "data/max_tokens"),
        ("data.sources={mine: {path: x, max_documents: 0}}", "data/sources/mine/max_documents"),
        ("data.sources={mine: {}}", "data/sources/mine"),
    ],
)
def test_nonsense_is_refused_by_its_path(override: str, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        merge([DataConfig], {}, [override])
