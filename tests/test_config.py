"""Configuration: declared fields -> tree -> YAML text -> tree -> instances, and what is said when a value is wrong."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config_examples import Colour, Fade, Leaf, Train, message
from holdfast import config
from holdfast.config import build, configuration, configure, field, flatten, merge, read_yaml, schema, to_yaml
from holdfast.conversion import from_yaml, to_yaml_text
from holdfast.errors import ConfigError, UserError


def through_yaml(values: dict[str, Any], folder: Path, *classes: type) -> dict[str, Any]:
    """Values -> validated tree -> commented YAML on disk -> what is read from there."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(merge(classes, values), classes, "some/job"), encoding="utf-8")
    read = read_yaml(path)
    assert read.pop("job") == "some/job"
    return read


def test_defaults_survive_the_round_trip(tmp_path: Path) -> None:
    read = through_yaml({}, tmp_path, Train)
    assert read == OmegaConf.to_container(build(Train))
    assert configure(Train, merge([Train], read)) == Train()


def test_every_field_is_written_with_its_help_above_it() -> None:
    lines = to_yaml(build(Train), [Train], "some/job").splitlines()
    for entry in schema(Train).values():
        key = entry.path.rsplit("/", 1)[-1] + ":"
        at = next(n for n, line in enumerate(lines) if line.strip().startswith(key))
        assert lines[at - 1].strip().startswith(f"# {entry.help}"), entry.path
    assert "    # its shape (linear, cosine)" in lines


finite = st.floats(allow_nan=False, allow_infinity=False)
# OmegaConf reads ??? as "must be set" and ${ as interpolation; control characters cannot stand in a YAML file.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t :#'\"-")).filter(
    lambda text: text != "???" and "${" not in text
)
tricky = st.sampled_from(["", "null", "~", "true", "yes", "off", "on", "No", "y", "N", "0o17", "010",
                          "0b11", "1e5", "1e9", "007", "0x1f", "1_000", "-", "- a", "a: b",
                          "# no comment", "nan", ".inf", "2020-01-01", "1:30", "\n", " x ", "{}", "[]", "'", '"',
                          "=", "<<", "*a", "&a", "!x", "%", "@", "`", "\\", "a\\", "$", "é\u2028x"])  # fmt: skip
words = texts | tricky
leaves = st.builds(
    Leaf,
    name=words,
    share=finite,
    colour=st.sampled_from(Colour),
    note=st.none() | words,
    inner=st.lists(st.integers(), max_size=3),
)
trains = st.builds(
    Train,
    batch_size=st.integers(1, 10**15),
    tokens=st.lists(st.integers(1, 10**12), max_size=3),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    validate=st.booleans(),
    limit=st.none() | st.integers(1),
    label=words,
    note=st.none() | words,
    zero=st.integers(),
    empty=st.lists(words, max_size=3),
    kind=st.sampled_from(["a", "b"]),
    colour=st.sampled_from(Colour),
    pair=st.tuples(st.integers(), finite),
    many=st.lists(finite, max_size=3).map(tuple),
    table=st.dictionaries(words, st.floats(0, 1e300), max_size=3),
    either=st.integers() | words,
    leaf=st.none() | leaves,
    leaves=st.lists(st.lists(leaves, max_size=2), max_size=2),
    fade=st.builds(Fade, overlap=st.floats(0, 1), curve=st.sampled_from(["linear", "cosine"])),
)


def slash_tree(instance: Any) -> dict[str, Any]:
    """The values of an instance by slash path, which a config file may use as keys."""
    tree: dict[str, Any] = {}
    for item in dataclasses.fields(instance):
        value = getattr(instance, item.name)
        tree |= {item.metadata["path"]: config.plain(value)} if item.metadata else slash_tree(value)
    return tree


@settings(deadline=None, max_examples=60)
@given(instance=trains)
def test_any_values_survive_the_round_trip(tmp_path_factory: pytest.TempPathFactory, instance: Train) -> None:
    read = through_yaml(slash_tree(instance), tmp_path_factory.getbasetemp(), Train)
    assert configure(Train, merge([Train], read)) == instance


def random_class(draw: st.DrawFn) -> tuple[type, dict[str, Any]]:
    """A config class with fields at random depths, and the default of each path."""
    scalars: list[tuple[Any, st.SearchStrategy[Any]]] = [
        (int, st.integers()), (float, finite), (bool, st.booleans()), (str, words), (Colour, st.sampled_from(Colour)),
        (Optional[int], st.none() | st.integers()),
        (List[List[Leaf]], st.lists(st.lists(leaves, max_size=2), max_size=2)),
    ]  # fmt: skip
    names = st.sampled_from(["alpha", "beta", "gamma", "delta"])
    paths = draw(st.lists(st.lists(names, min_size=1, max_size=4).map("/".join), min_size=1, max_size=6, unique=True))
    paths = [path for path in paths if not any(other.startswith(path + "/") for other in paths)]
    defaults, fields = {}, []
    for index, path in enumerate(paths):
        kind, values = draw(st.sampled_from(scalars))
        defaults[path] = draw(values)
        fields.append((f"f{index}", kind, field(path, default_factory=lambda value=defaults[path]: value, help="h")))
    return dataclasses.make_dataclass("Random", fields, frozen=True), defaults


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_random_trees_of_fields_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cls, defaults = random_class(data.draw)
    read = through_yaml({}, tmp_path_factory.getbasetemp(), cls)
    assert configure(cls, merge([cls], read)) == cls()
    assert flatten(merge([cls], read), [cls]) == {path: config.plain(value) for path, value in defaults.items()}


def test_slash_paths_are_keys_too_and_empty_sections_change_nothing() -> None:
    made = configure(Train, merge([Train], {"training/batch_size": 3, "training": {"fade": None}, "eval": None}))
    assert made == dataclasses.replace(Train(), batch_size=3)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.batch_size=32", "training/batch_size", 32),
        ("training/batch_size=1e3", "training/batch_size", 1000.0),
        ("training.dataset.0.0.rate=0.5", "training/dataset", [
            [{"name": "fineweb", "rate": 0.5, "style": "PMD"}], [{"name": "mnli", "rate": 1, "style": "PADDED"}]]),
        ("training.dataset.1=[{name: x}]", "training/dataset", [
            [{"name": "fineweb", "rate": 1, "style": "PMD"}], [{"name": "x"}]]),
        ("training.tokens.1=7", "training/tokens", [10, 7]),
        ("training.tokens=[1,2,3]", "training/tokens", [1, 2, 3]),
        ("training={batch_size: 4}", "training/batch_size", 4),
        ("training.fade={overlap: 0.25}", "training/fade/overlap", 0.25),
        ("eval.limit=null", "eval/limit", None),
        ("optimization.table.new=3", "optimization/table", {"new": 3}),
        ("training.leaf.name=x", "training/leaf", {"name": "x"}),
        ("training.label=a=b", "training/label", "a=b"),
        ("training.label=007", "training/label", "007"),
        ("training.note=1e5", "training/note", "1e5"),
        ("training.note=null", "training/note", None),
        ("training.label='quoted'", "training/label", "quoted"),
        ("training.validation=true", "training/validation", True),
    ],
)  # fmt: skip
def test_overrides(override: str, path: str, value: Any) -> None:
    assert flatten(merge([Train], {}, [override]), [Train])[path] == value


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("training.batch_size", "training.batch_size: expected an override of the form path=value"),
        ("=3", "=3: expected an override of the form path=value"),
        (".=3", ".=3: expected an override of the form path=value"),
        ("training.batchsize=3", "training/batchsize: unknown configuration key; did you mean training/batch_size?"),
        ("training.batch_size=many", "training/batch_size: got 'many', expected a whole number"),
        ("training.batch_size.inner=3", "training/batch_size/inner: there is nothing at 'inner'"),
        ("training.dataset.0.0.rate=2", "training/dataset/0/0/rate: got 2.0"),
        ("training.dataset.5.0.rate=0", "training/dataset/5/0/rate: '5' is not an index into a list of 2"),
        ("training.tokens.-1=3", "training/tokens/-1: '-1' is not an index"),
        ("training.tokens.x=3", "training/tokens/x: 'x' is not an index"),
        ("training.dataset.0.0.rat=1", "training/dataset/0/0/rat: unknown configuration key"),
        ("training=3", "training: got 3, expected a section"),
        ("training.label=${oc.env:HOME}", "training.label=${oc.env:HOME}: values have no ${...} interpolation"),
        ("training.label=${", "training.label=${: values have no"),
        ("training.tokens=[1,", "training.tokens=[1,: the value cannot be parsed"),
        ("training.tokens=0x_", "training.tokens=0x_: the value cannot be parsed"),
        ("training.validation='yes'", "training/validation: got 'yes', expected true or false"),
    ],
)  # fmt: skip
def test_overrides_that_are_wrong(override: str, start: str) -> None:
    assert message({}, override).startswith(start)


def test_later_overrides_win_over_earlier_ones_and_over_values() -> None:
    cfg = merge([Train], {"training": {"batch_size": 2}}, ["training.batch_size=3", "training.batch_size=4"])
    assert configure(Train, cfg).batch_size == 4


def test_merge_leaves_what_it_was_given_alone() -> None:
    values = {"training": {"tokens": [1, 2], "dataset": [[{"name": "x", "rate": 1.0}]]}}
    merge([Train], values, ["training.tokens.0=9", "training.dataset.0.0.rate=0.5"])
    assert values == {"training": {"tokens": [1, 2], "dataset": [[{"name": "x", "rate": 1.0}]]}}


def test_merge_takes_a_tree_as_well_as_a_mapping() -> None:
    cfg = build(Train)
    cfg.training.batch_size = 8
    assert configure(Train, merge([Train], cfg)) == dataclasses.replace(Train(), batch_size=8)


def test_classes_share_a_path_when_they_agree() -> None:
    @dataclass(frozen=True)
    class Other:
        rows: int = field("training/batch_size", default=512)

    assert list(schema(Train, Other)) == list(schema(Train))


@pytest.mark.parametrize(("kind", "default"), [(int, 64), (float, 512), (Optional[int], 512)])
def test_a_path_declared_twice_with_another_type_or_default_names_both(kind: Any, default: Any) -> None:
    fields = [("rows", kind, field("training/batch_size", default=default))]
    other = dataclasses.make_dataclass("Other", fields, frozen=True)
    with pytest.raises(ValueError, match=r"training/batch_size is declared twice, by Train .* and by Other"):
        build(Train, other)


@pytest.mark.parametrize("path", ["training/batch_size/inner", "training", "training/fade"])
def test_a_path_cannot_be_a_value_and_a_section(path: str) -> None:
    other = dataclasses.make_dataclass("Other", [("x", int, field(path, default=1))], frozen=True)
    with pytest.raises(ValueError, match=r"is a value and cannot also hold"):
        schema(Train, other)


def test_a_field_without_a_path_is_the_programmers_error() -> None:
    with pytest.raises(ValueError, match=r"Bad\.x has no path"):
        schema(dataclasses.make_dataclass("Bad", [("x", int, 3)]))


def test_a_value_without_a_default_must_be_set() -> None:
    @dataclass(frozen=True)
    class Needy:
        x: int = field("training/x")

    assert build(Needy) == {"training": {"x": "???"}}
    assert configure(Needy, merge([Needy], {}, ["training.x=3"])).x == 3
    for cfg in (merge([Needy], {}), OmegaConf.create({})):
        with pytest.raises(
            ConfigError, match="training/x: got None, expected a whole number; this value has no default"
        ):
            configure(Needy, cfg)


def test_an_inner_class_keeps_the_defaults_that_the_outer_class_gives_it() -> None:
    @dataclass(frozen=True)
    class Outer:
        fade: Fade = dataclasses.field(default_factory=lambda: Fade(overlap=0.5))

    assert configure(Outer, build(Outer)) == Outer()
    assert configure(Outer, OmegaConf.create({})) == Outer()
    assert configure(Outer, merge([Outer], {}, ["training.fade.curve=cosine"])).fade == Fade(0.5, "cosine")


def test_the_check_of_a_class_runs_when_it_is_configured() -> None:
    @dataclass(frozen=True)
    class Checked:
        low: int = field("range/low", default=1)
        high: int = field("range/high", default=2)

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ConfigError("range/low", self.low, "at most range/high")

    with pytest.raises(ConfigError, match="range/low: got 5"):
        configure(Checked, merge([Checked], {}, ["range.low=5"]))


def test_configuration_blocks_nest_and_end() -> None:
    first, second = merge([Train], {}, ["training.batch_size=1"]), merge([Train], {}, ["training.batch_size=2"])
    with configuration(first):
        with configuration(second):
            assert configure(Train).batch_size == 2
        assert configure(Train).batch_size == 1
    with pytest.raises(RuntimeError, match="no configuration is active"):
        configure(Train)


def test_instances_are_frozen_and_do_not_share_lists() -> None:
    cfg = build(Train)
    made, again = configure(Train, cfg), configure(Train, cfg)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.batch_size = 3  # type: ignore[misc]  # that it cannot be set is what is tested
    made.tokens.append(1)
    assert again.tokens == [10, 20]
    assert configure(Train, cfg).tokens == [10, 20]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: [1,", "not valid YAML"),
        ("training: {a: 1}\ntraining: {a: 2}", "not valid YAML"),
        ("a: 0x_", "not valid YAML"),
        ("a: &x [*x]", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("- a\n- b", "expected a mapping of sections"),
        ("3", "expected a mapping of sections"),
        ("on: 1\n'on': 2", "not valid YAML"),
    ],
)
def test_files_that_are_no_config(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_yaml(tmp_path / "x.yaml")
    assert str(caught.value).startswith(str(tmp_path / "x.yaml"))


YAML_12 = {
    "on": "on", "off": "off", "yes": "yes", "no": "no", "y": "y", "n": "n", "On": "On", "YES": "YES", "NO": "NO",
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False, "tRUE": "tRUE",
    "null": None, "Null": None, "~": None, "": None, "nULL": "nULL",
    "010": 10, "-08": -8, "0o17": 15, "0o18": "0o18", "0b11": "0b11", "0x1F": 31, "1_000": 1000, "+3": 3,
    "1:30": "1:30", "1:30.5": "1:30.5", "2020-01-01": "2020-01-01", "=": "=",
    "1e5": 1e5, "1.5e-3": 0.0015, ".5": 0.5, "5.": 5.0, "-.inf": float("-inf"), "1e": "1e", ".": ".",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), YAML_12.items())
def test_yaml_is_read_by_the_rules_of_version_1_2(text: str, value: Any) -> None:
    read = from_yaml(f"a: {text}\nb: [{text or '~'}]\n{text or '~'}: 1")
    assert list(read.values()) == [value, [value], 1]
    assert [type(item) for item in (read["a"], read["b"][0], list(read)[2])] == [type(value)] * 3


@pytest.mark.parametrize("text", [*YAML_12, "0O7", "12:30:45", "<<", "0.1_0", "190:20:30.15", "!x", "a: b"])
def test_texts_are_written_so_that_readers_of_both_versions_see_texts(text: str) -> None:
    written = to_yaml_text({text: [text], "inside": {text: text}})
    expected = {text: [text], "inside": {text: text}}
    assert from_yaml(written) == yaml.safe_load(written) == expected
    for word in ("y", "n", "Y", "N"):  # PyYAML leaves these two out of version 1.1
        assert to_yaml_text({word: word}) == f"'{word}': '{word}'\n"


@dataclass(frozen=True)
class Switch:
    on: str = field("kl/on", default="batch", choices=("batch", "old"))
    inside: str = field("on/off/yes", default="no")
    names: List[str] = field("kl/names", default_factory=list)
    flag: bool = field("kl/flag", default=False)


def test_the_key_on_is_written_quoted_and_read_unquoted(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("kl: {on: old, names: [yes, no]}\non: {off: {yes: on}}")
    cfg = merge([Switch], read_yaml(path), ["kl.names.0=off"])
    assert configure(Switch, cfg) == Switch("old", "on", ["off", "no"])
    text = to_yaml(cfg, [Switch], "some/job")
    assert "'on': old" in text
    assert "\n'on':\n  'off':\n    'yes': 'on'" in text
    path.write_text(text)
    assert merge([Switch], {k: v for k, v in read_yaml(path).items() if k != "job"}) == cfg
    assert yaml.safe_load(text) == read_yaml(path)


@pytest.mark.parametrize(("word", "right"), [("yes", "true"), ("On", "true"), ("no", "false"), ("off", "false")])
def test_a_word_for_a_boolean_says_what_to_write(word: str, right: str) -> None:
    with pytest.raises(UserError, match=f"kl/flag: got '{word}', expected true or false; write {right}"):
        merge([Switch], {}, [f"kl.flag={word}"])


@dataclass(frozen=True)
class Keyed:
    share: float = 0.1
    from_: Optional[List[str]] = dataclasses.field(default=None, metadata={"key": "from"})


@dataclass(frozen=True)
class HasKeyed:
    replay: Optional[Keyed] = field("training/replay", default=None)


@pytest.mark.parametrize("name", ["from", "from_"])
def test_a_key_that_is_no_name_in_python(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"training: {{replay: {{{name}: [a]}}}}")
    expected = HasKeyed(Keyed(0.1, ["a"]))
    for cfg in (merge([HasKeyed], read_yaml(path)), merge([HasKeyed], {}, [f"training.replay.{name}=[a]"]),
                merge([HasKeyed], {}, [f"training.replay={{{name}: [a]}}"])):  # fmt: skip
        assert configure(HasKeyed, cfg) == expected
        assert flatten(cfg, [HasKeyed]) == {"training/replay": {"from": ["a"]}}, "the documented key is written"
        assert through_yaml(OmegaConf.to_container(cfg), tmp_path, HasKeyed) == {
            "training": {"replay": {"from": ["a"]}}
        }
    with pytest.raises(
        UserError, match=r"training/replay/fro: unknown configuration key; did you mean training/replay/from\?"
    ):
        merge([HasKeyed], {}, ["training.replay.fro=[a]"])
    with pytest.raises(UserError, match=r"training/replay/from: got .*, expected from or from_, not both"):
        merge([HasKeyed], {"training": {"replay": {"from": [], "from_": []}}})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such config file; `holdfast configure JOB"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe\n")
    for path in (tmp_path, tmp_path / "bytes.yaml"):
        with pytest.raises(UserError, match=r"cannot be read|not valid YAML"):
            read_yaml(path)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "x.yaml") == {}


def test_the_environment_does_not_reach_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "hunter2")
    (tmp_path / "x.yaml").write_text("training:\n  label: ${oc.env:SECRET_OF_TEST}\n")
    said = message(read_yaml(tmp_path / "x.yaml"))
    assert said.startswith("training/label")
    assert "hunter2" not in said
