"""Leaks: copies are found, however they are dressed, and nothing else."""

from pathlib import Path

import pytest

from data_examples import GPT2, SHARED, make_store, needs_shared, tasks, texts
from holdfast.data import leaks
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.prepare import prepare
from holdfast.data.store import TokenStore
from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.data.tokenizers.train import train_tokenizer
from holdfast.errors import UserError

BYTES = load_tokenizer("bytes")
WORDS = [f"word{index}" for index in range(400)]


def passage(start: int, count: int) -> str:
    return " ".join(WORDS[start : start + count])


def only(held_out: TokenStore, train: TokenStore, tokenizer: Tokenizer = BYTES) -> Leak:
    (leak,) = check_leaks({"v": held_out}, {"t": train}, tokenizer)
    return leak


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_each_way_to_find_a_leak(kind: str, tmp_path: Path) -> None:
    tokenizer = BYTES if kind == "bytes" else train_tokenizer([passage(0, 400)], 400, "trained")
    train = make_store(tmp_path, texts("Short  Text.", passage(0, 100), passage(200, 60)), tokenizer, "train")
    held_out = make_store(
        tmp_path,
        texts(
            "short text.",  # the same but for case and blanks
            passage(50, 20).upper().replace(" ", ", "),  # inside a training text, in another dress
            passage(90, 20),  # begins there and goes elsewhere: less than half of its runs
            passage(300, 40),  # unseen
            "short",  # part of a text, too short to mean anything
            passage(88, 12) + " " + passage(200, 12),  # both halves seen, but no run of 13 words
        ),
        tokenizer,
        "held_out",
    )
    leak = only(held_out, train, tokenizer)
    assert (leak.exact, leak.group, leak.ngram) == (1, 0, 1)
    assert (leak.leaked, leak.rows, leak.examples) == (2, 6, (0, 1))
    assert leak.share == pytest.approx(1 / 3)


def test_groups_and_prompts(tmp_path: Path) -> None:
    train = [Document("0", prompt="p1 h1", answer="yes", group="p1"), Document("1", prompt="p2 h2", answer="no")]
    held_out = [
        Document("0", prompt="p1 h9", answer="yes", group="p1"),  # same premise
        Document("1", prompt="P2  h2", answer="yes"),  # same prompt, whatever the answer
        Document("2", prompt="p3 h3", answer="no", group="p3"),
    ]
    leak = only(make_store(tmp_path, held_out, name="v"), make_store(tmp_path, train, name="t"))
    assert (leak.exact, leak.group, leak.leaked, leak.examples) == (1, 1, 2, (0, 1))


def test_runs_do_not_cross_documents_nor_get_lost_between_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = make_store(tmp_path, texts(passage(0, 13), passage(100, 13)), name="v")
    train = make_store(
        tmp_path,
        texts(passage(0, 6), passage(6, 7), *[passage(200 + n, 20) for n in range(50)], passage(100, 13)),
        name="t",
    )
    for piece in (1, 100, 1 << 21):
        monkeypatch.setattr(leaks, "PIECE", piece)
        leak = only(held_out, train)
        assert (leak.ngram, leak.examples) == (1, (1,))


def test_above_the_limit_it_stops_and_names_the_sets(tmp_path: Path) -> None:
    train = make_store(tmp_path, tasks(("a", "b"), ("c", "d")), name="t")
    held_out = make_store(tmp_path, tasks(("a", "b"), ("x", "y")), name="v")
    assert check_leaks({"v": held_out}, {"t": train}, BYTES, max_leak=0.5)[0].share == 0.5
    with pytest.raises(UserError, match=r"(?s)data/max_leak.*v: 1 of 2 held-out rows \(50.0%\) also occur in"):
        check_leaks({"v": held_out}, {"t": train}, BYTES, max_leak=0.49)


def test_results_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = make_store(tmp_path, tasks(("a", "b")), name="t")
    held_out = make_store(tmp_path, tasks(("a", "b")), name="v")
    first = check_leaks({"v": held_out}, {"t": train}, BYTES, cache=tmp_path / "cache")

    def forbidden(*_: object) -> None:
        raise AssertionError("looked again")

    monkeypatch.setattr(leaks, "_count", forbidden)
    assert check_leaks({"v": held_out}, {"t": train}, BYTES, cache=tmp_path / "cache") == first


SAID = (
    "The old lighthouse keeper counted seven ships before dusk, and wrote their names into a book that nobody had "
    "opened since his father left the island. Every spring a painter came to look at the harbour, bought bread from "
    "the baker's daughter, and promised to send a picture which never arrived."
)


def changed(text: str, every: int, first: int) -> str:
    """A text with one word in so many replaced."""
    words = text.split()
    for number, place in enumerate(range(first, len(words), every)[: len(words) // every]):
        words[place] = f"other{chr(97 + number)}"
    return " ".join(words)


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        ("Hello, world!", "hello world"),
        ("It's -- well -- a (very) good film.", "it s well a very good film"),
        ("A “quoted” word … and more", 'a "quoted" word... and more'),
        ("The oﬃce №５ of ＡＢＣ", "the office no5 of abc"),  # a ligature, full width letters
        ("Cafe\u0301 STRASSE", "café straße"),  # a combining accent; folded case
        ("3 × 4 = 12", "3*4=12"),
    ],
)
def test_punctuation_and_spelling_of_characters_make_no_difference(trained: str, held_out: str, tmp_path: Path) -> None:
    store, train = make_store(tmp_path, texts(held_out), name="v"), make_store(tmp_path, texts(trained), name="t")
    leak = only(store, train)
    assert (leak.exact, leak.leaked) == (1, 1)
    prompts = make_store(tmp_path, tasks((held_out, " yes")), name="p")
    assert only(prompts, make_store(tmp_path, tasks((trained, " no")), name="q")).exact == 1


@pytest.mark.parametrize("first", range(12))
def test_one_word_in_twelve_changed_is_found(first: int, tmp_path: Path) -> None:
    twelve = " ".join(SAID.split()[:12])
    held_out = texts(changed(SAID, 12, first), changed(twelve, 12, first), changed(SAID, 4, first % 4))
    train = texts("Something before. " + SAID + " And something after.", "a text of its own")
    leak = only(make_store(tmp_path, held_out, name="v"), make_store(tmp_path, train, name="t"))
    assert (leak.near, leak.examples) == (2, (0, 1))  # one word in four is another text


def test_short_rows_are_found_inside_longer_ones_by_runs_of_five_words(tmp_path: Path) -> None:
    held_out = texts(
        "a picture which never arrived",
        "Every spring, a painter came to look!",
        "every spring a painter went to look",  # one word of seven is more than one in twelve
        "the baker's daughter",  # too short to tell
        "1 2 3 4 5 6 7",
    )
    leak = only(
        make_store(tmp_path, held_out, name="v"), make_store(tmp_path, texts(SAID, "0 1 2 3 4 5 6 7 8 9"), name="t")
    )
    assert (leak.near, leak.examples) == (2, (0, 1))


def test_templates_signs_and_generated_tasks_raise_no_alarm(tmp_path: Path) -> None:
    frame = "Read what follows and then say in one word whether the person who wrote it was pleased: {}. Answer:"
    nouns = [f"the {colour} {thing}" for colour in ("red", "blue", "grey", "pink") for thing in WORDS[:10]]
    held_out = make_store(tmp_path, tasks(*((frame.format(noun), " yes") for noun in nouns[:20])), name="v")
    train = make_store(tmp_path, tasks(*((frame.format(noun), " yes") for noun in nouns[20:])), name="t")
    assert only(held_out, train).near == 0
    sums = make_store(tmp_path, tasks(("34+5=", "39"), ("12 - 3 =", "9")), name="sums")
    differences = make_store(tmp_path, tasks(("34-5=", "29"), ("12 + 3 =", "15")), name="differences")
    assert only(sums, differences).leaked == 0
    data = DataConfig(cache=str(tmp_path / "cache"))
    stores = [
        {name: prepare(name, split, data=data, tokenizer=BYTES, progress=False) for name in ("lists", "topics")}
        for split in ("validation", "train")
    ]
    assert [leak.leaked for leak in check_leaks(*stores, BYTES)] == [0, 0, 0, 0]


def test_near_rows_do_not_depend_on_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = make_store(tmp_path, texts("nothing of this", changed(SAID, 12, 3), SAID.upper()), name="v")
    train = make_store(tmp_path, texts("before it", SAID, *[passage(n, 20) for n in range(50)]), name="t")
    for piece in (1, 100, 1 << 21):
        monkeypatch.setattr(leaks, "PIECE", piece)
        leak = only(held_out, train)
        assert (leak.exact, leak.near, leak.examples) == (1, 2, (1, 2))


@needs_shared
def test_real_validation_rows_raise_no_false_alarm(tmp_path: Path) -> None:
    data = DataConfig(root=str(SHARED / "data"), cache=str(tmp_path))
    names = ("mnli", "qqp", "siqa", "sst2")
    held_out, train = (
        {name: prepare(name, split, data=data, tokenizer=BYTES, progress=False) for name in names}
        for split in ("validation", "train")
    )
    found = {(leak.held_out, leak.training): leak.leaked for leak in check_leaks(held_out, train, BYTES) if leak.leaked}
    # Looked at by eye: qqp asks four questions again with another name, and sst2 has `bad .` and `cool ?`.
    assert found == {("qqp", "qqp"): 4, ("sst2", "sst2"): 2}


@needs_shared
def test_the_real_tasks_do_not_leak_and_planted_rows_are_found(tmp_path: Path) -> None:
    data = DataConfig(root=str(SHARED / "data"), cache=str(tmp_path))
    tokenizer = load_tokenizer(GPT2)
    train, held_out = (
        {name: prepare(name, split, data=data, tokenizer=tokenizer, progress=False) for name in ("mnli", "fineweb")}
        for split in ("train", "validation")
    )
    assert [leak.leaked for leak in check_leaks(held_out, train, tokenizer)] == [0, 0, 0, 0]
    planted = [tokenizer.decode(held_out["fineweb"].tokens(index)) for index in (3, 8)]
    spoilt = make_store(tmp_path, texts("Intro. " + planted[0].upper(), "other " + planted[1]), tokenizer, "spoilt")
    (leak,) = check_leaks({"v": held_out["fineweb"]}, {"t": spoilt}, tokenizer)
    assert leak.examples == (3, 8)
