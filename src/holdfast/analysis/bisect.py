"""When was it lost, and to which rows? A run's steps are taken again, measured at finer and finer grain.

1. The checkpoints say between which of them to look; these steps are taken again and the target is measured between
   them. The steepest rise is looked at more and more closely, down to single steps.
2. Where no other place of the run rose half as steeply, and the rise is one of all questions (Wilcoxon's signed-rank
   test) or no other rose a sixth as steeply, that is a single place. Otherwise it was lost evenly.
3. The rows of the steps up to the top of the rise are ranked by their effect on it (`influence`).
4. The proof: the same steps without the first rows of that ranking, and 39 times without as many random rows of these
   steps. Rows are accused only if leaving them out does better than every one of these, and undoes half of the rise.

Beating random masks alone would accuse somebody in almost every run: the rows that did most harm to a target are found
by looking, in clean runs too. The innocent are kept out by the second point: the worst place of a clean run is not far
worse than the next, or is one of a few questions.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from holdfast.analysis.influence import row_effects
from holdfast.analysis.replay import Masks, Replay, Snapshot, rows_of
from holdfast.analysis.target import Losses, Target
from holdfast.errors import UserError
from holdfast.evaluation.matrix import finite
from holdfast.training.state import TrainState
from holdfast.types import Json

Word = Literal["rows", "place", "evenly", "kept"]

CELLS = 128  # parts of the window that are measured first
ZOOM = 8  # how much finer each further look is
LEAST_ROWS = 256  # that an interval holds
SHARE = 4  # an interval is at most a fourth of the steps that are looked at
LEAST_STEPS = 16  # of an interval: momentum carries a gradient over about ten steps
KNOWN = 0.8  # of the error of guessing, below which something is known that can be lost
FEWEST_OTHERS = 4  # measurements far from a place, for it to stand out
STANDS_OUT = 2.0  # how many times every other rise the steepest must be
DOUBT = 0.002  # of Wilcoxon's signed-rank test over questions, below which a rise is of the task, not of a few of them
FEWEST = 10  # questions for such a test
ALONE = 6.0  # how many times every other rise one must be that is not tested so
SIZES = (8, 16, 32, 64)  # rows that are left out: the first that undo half of the rise
UNDONE = 0.5  # share of the rise that the proof must undo
CONTROLS = 39
SURE = 3.0  # standard errors over questions beyond which a rise is no accident of these questions
FOLLOWED = 4  # intervals after the place in which the run without the rows is followed
MOST_SHOWN = 24  # rows of the ranking


class Place(NamedTuple):
    """The steps in which it was lost."""

    start: int
    end: int  # the step after the last: the top of the rise
    before: float  # the target just before the rise
    after: float  # at its top
    rise: float  # of the error, in the first look
    elsewhere: float  # the steepest rise of the same length elsewhere

    @property
    def stands_out(self) -> bool:
        """Whether no other place rose half as steeply."""
        return self.rise > 0 and self.rise >= STANDS_OUT * self.elsewhere


@dataclass(frozen=True)
class RankedRow:
    """A row of the steps in which it was lost.

    Args:
        step: that drew it; steps count from 0.
        place: in the step's batch.
        row: its number in its source.
        harm: by how much the target's log-loss would fall without it, to first order.
    """

    step: int
    place: int
    source: str
    row: int
    harm: float
    text: str = ""
    accused: bool = False


@dataclass(frozen=True)
class Proof:
    """The target's log-loss at the top of the rise: with all rows, without those ranked first, without random ones."""

    size: int
    original: float
    without: float
    controls: tuple[float, ...]
    before: float
    followed: tuple[tuple[int, float, float], ...] = ()  # (step, with, without) after the rise

    @property
    def undone(self) -> float:
        """The share of the rise that leaving the rows out undoes."""
        return (self.original - self.without) / max(self.original - self.before, 1e-12)

    @property
    def beats_all(self) -> bool:
        """Whether leaving the rows out does better than every random mask."""
        return self.without < min(self.controls)

    @property
    def deviations(self) -> float:
        """How far below the random masks' mean it is, in their standard deviations."""
        spread = float(np.std(self.controls, ddof=1))
        return (float(np.mean(self.controls)) - self.without) / max(spread, 1e-12)


@dataclass(frozen=True)
class Bisection:
    """What was found."""

    run: str
    target: str
    kind: str
    count: int
    window: tuple[int, int]
    curve: tuple[tuple[int, float, float, float], ...]  # (step, log-loss, error, accuracy), in order
    word: Word
    place: Place | None = None
    rows: tuple[RankedRow, ...] = ()
    num_rows: int = 0
    proof: Proof | None = None
    steps_taken: int = 0
    measured: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def accused(self) -> tuple[RankedRow, ...]:
        """The rows that are proved to have done it."""
        return tuple(row for row in self.rows if row.accused)


class Told(NamedTuple):
    """How far the work is."""

    doing: str
    done: int
    total: int


Tell = Callable[[Told], object]


class Plan(NamedTuple):
    """The steps that are looked at, and what that takes."""

    start: int
    end: int
    interval: int  # steps
    batch_size: int

    @property
    def grain(self) -> int:
        """Steps between measurements in the first look."""
        return max(1, math.ceil((self.end - self.start) / CELLS))

    def costs(self) -> str:
        """Steps and measurements, in words."""
        steps, looks, grain = self.end - self.start, -(-(self.end - self.start) // self.grain) + 1, self.grain
        while grain > 1:
            finer = max(1, grain // ZOOM)
            steps, looks, grain = steps + 4 * grain + 3 * self.interval, looks + 4 * grain // finer + 1, finer
        proof = (CONTROLS + len(SIZES)) * self.interval + 3 * self.interval + FOLLOWED * self.interval
        return (
            f"{steps:,} steps are taken again and about {looks} measurements made; where one place stands out, about "
            f"{proof:,} steps and {CONTROLS + len(SIZES) + 20} measurements more for the proof"
        )


def error(found: Losses, *, chosen: bool) -> float:
    """What is searched by: the expected share of wrong answers where there are choices, else the log-loss.

    Of what is hardly known a log-loss moves much by accident; a share of wrong answers does not.
    """
    if not chosen:
        return found.mean
    return float((-np.expm1(-found.loss) * found.weight).sum() / found.weight.sum())


def bisect(
    replay: Replay,
    target: Target,
    *,
    since: int | None = None,
    until: int | None = None,
    seed: int = 0,
    say: Callable[[str], object] = lambda _: None,
    tell: Tell = lambda _: None,
) -> Bisection:
    """Find the steps and the rows to which a target was lost.

    Args:
        since, until: steps to look between; from the checkpoint where it was known best if it was lost since, else all.
        seed: of the random masks.
        say: is called with a line before the work begins.
        tell: is called as the work goes on.
    """
    search = Search(replay, target, tell)
    plan = search.window(since, until)
    say(plan.costs())
    place, snapshot = search.find(plan)
    found = Bisection(
        run=str(replay.run_dir),
        target=target.name,
        kind=target.kind,
        count=target.count,
        window=(plan.start, plan.end),
        curve=search.points(),
        word="evenly" if search.lost_in_all(plan) else "kept",
        place=place,
        notes=search.notes(),
    )
    if place.stands_out and search.sure(place):
        ranked, proof = Trial(search, place, snapshot, seed).held()
        word: Word = "rows" if proof.beats_all and proof.undone >= UNDONE else "place"
        rows = _described(replay, ranked, proof.size if word == "rows" else 0)
        found = replace(found, word=word, rows=rows, num_rows=len(ranked), proof=proof)
    return replace(found, steps_taken=replay.steps_taken, measured=search.measured)


class Search:
    """Measurements of a target along a run, and the steepest rise between them.

    Args:
        tell: is called as the work goes on.
    """

    def __init__(self, replay: Replay, target: Target, tell: Tell) -> None:
        self.replay, self.target, self.tell = replay, target, tell
        self.curve: dict[int, Losses] = {}
        self.measured = 0
        self.differs: str | None = None

    def notes(self) -> tuple[str, ...]:
        """What the user should know of the steps that were taken again."""
        said = []
        if not any(self.known(step) for step in self.curve):
            said.append(f"{self.target.name} was never known: no measurement is clearly better than guessing.")
        if self.differs is not None:
            cores = self.replay.checkpoints[-1].manifest.get("cores")
            said.append(
                f"The steps taken again are not the run's own to the bit ({self.differs}): the run was trained on "
                f"{cores} cores or with other versions. What is found is of the steps taken here."
            )
        return tuple(said)

    def measure(self, state: TrainState) -> Losses:
        """Measure a state."""
        self.measured += 1
        return self.target.losses(state)

    def error(self, step: int) -> float:
        """The error at a step that was measured."""
        return error(self.curve[step], chosen=self.target.chosen)

    def known(self, step: int) -> bool:
        """Whether the target was known at a step that was measured, at all: what is not cannot be lost."""
        guessing = self.target.guessing
        return guessing is None or self.error(step) < KNOWN * guessing

    def points(self) -> tuple[tuple[int, float, float, float], ...]:
        """All that was measured of the run itself, in order."""
        return tuple((step, found.mean, self.error(step), found.accuracy) for step, found in sorted(self.curve.items()))

    def window(self, since: int | None, until: int | None) -> Plan:
        """The steps to look at."""
        replay = self.replay
        newest = replay.checkpoints[-1].step
        end = newest if until is None else until
        batch_size = replay.curriculum.batch_size
        interval = max(LEAST_STEPS, -(-LEAST_ROWS // batch_size))
        if end > newest:
            raise UserError(f"--until {end}: the newest checkpoint of {replay.run_dir} is of step {newest}")
        earliest = replay.checkpoints[0].step
        start = since if since is not None else self._known_best(end)
        if start < earliest:
            raise UserError(
                f"--since {start}: the first checkpoint of {replay.run_dir} is of step {earliest}; steps before it "
                "cannot be taken again"
            )
        if end - start < 2:
            raise UserError(
                f"{replay.run_dir}: there are no steps to look at between {start} and {end}: it has no checkpoint "
                f"before {end} from which they could be taken again"
            )
        return Plan(start, end, min(interval, max(1, (end - start) // SHARE)), batch_size)

    def _known_best(self, end: int) -> int:
        """The checkpoint to start from: where the target was known best if it was lost since, else the first."""
        infos = [info for info in self.replay.checkpoints if info.step <= end]
        if len(infos) < 2:
            return infos[0].step if infos else 0
        for number, info in enumerate(infos):
            self.tell(Told("measuring checkpoints", number, len(infos)))
            self.curve[info.step] = self.measure(self.replay.restore(info))
        last = infos[-1].step
        best = min(infos[:-1], key=lambda info: self.error(info.step)).step
        return best if self.rise_is_sure(best, last) else infos[0].step

    def rise_is_sure(self, first: int, last: int) -> bool:
        """Whether the target rose between two measurements by more than an accident of its questions."""
        rise = self.curve[last].mean - self.curve[first].mean
        return self.error(last) > self.error(first) and rise > SURE * self.curve[last].rise_error(self.curve[first])

    def sure(self, place: Place) -> bool:
        """Whether the rise of a place is one of the target, not of a few of its questions."""
        inside = [step for step in self.curve if place.start <= step < place.end]
        low, top = self.curve[min(inside, key=self.error)], self.curve[place.end]
        rises = top.loss - low.loss
        if place.rise >= ALONE * place.elsewhere or len(rises) < FEWEST:
            return place.rise >= ALONE * place.elsewhere
        broad: float = stats.wilcoxon(rises, alternative="greater").pvalue
        return broad < DOUBT

    def lost_in_all(self, plan: Plan) -> bool:
        """Whether the target is worse at the end than it was at its best."""
        inside = [step for step in self.curve if plan.start <= step <= plan.end]
        best, last = min(inside, key=self.error), max(inside)
        return best != last and self.known(best) and self.rise_is_sure(best, last)

    def find(self, plan: Plan) -> tuple[Place, Snapshot]:
        """The steepest rise, down to single steps, and a state before it."""
        replay = self.replay
        state = replay.advance(replay.restore(replay.before(plan.start)), plan.start)
        look = self._look(Snapshot.of(state), plan.start, plan.end, plan.grain, plan.interval)
        every = self._rises(look.steps)
        rises = {step: rise for step, rise in every.items() if self.known(step)} or dict.fromkeys(every, 0.0)
        steepest = max(rises, key=lambda step: rises[step])
        pace = max(float(np.median(list(rises.values()))), 0.0)  # of what is lost evenly
        # After a rise the weights swing for a while; that is no other place.
        far = [
            rise
            for step, rise in rises.items()
            if not steepest - plan.interval - 2 * plan.grain < step < steepest + 2 * plan.interval + 2 * plan.grain
        ]
        rise = rises[steepest] - pace
        # With nothing to compare it with, no place stands out.
        elsewhere = max(far) - pace if len(far) >= FEWEST_OTHERS else max(rise, 0.0)
        grain, snapshot = plan.grain, look.before[steepest]
        while grain > 1:
            finer = max(1, grain // ZOOM)
            first, last = max(steepest - grain, snapshot.step), min(steepest + 3 * grain, plan.end)
            look = self._look(snapshot, first, last, finer, plan.interval)
            rises = self._rises(look.steps)
            steepest = max(rises, key=lambda step: rises[step])
            grain, snapshot = finer, look.before[steepest]
        end = self._top(steepest, plan)
        start = max(plan.start, min(end - plan.interval, steepest - plan.interval // 4))
        low = min((step for step in self.curve if start <= step < end), key=self.error, default=steepest)
        found = Place(start, end, self.curve[low].mean, self.curve[end].mean, rise, max(elsewhere, 0.0))
        if snapshot.step > start:
            snapshot = Snapshot.of(replay.advance(replay.restore(replay.before(start)), start))
        return found, snapshot

    def _top(self, steepest: int, plan: Plan) -> int:
        """The measured step at which the error is highest, at or soon after the steepest rise."""
        near = [step for step in self.curve if steepest < step <= min(steepest + max(1, plan.interval // 2), plan.end)]
        return max(near, key=self.error)

    def _look(self, begin: Snapshot, first: int, last: int, grain: int, interval: int) -> "Look":
        """Take steps again and measure every so many of them."""
        steps = [*range(first, last, grain), last]
        wanted, kept = {*steps}, deque([begin], maxlen=6)
        before: dict[int, Snapshot] = {}
        known = {info.step for info in self.replay.checkpoints}

        def seen(state: TrainState) -> None:
            step = int(state.step)
            if step - kept[-1].step >= max(interval // 2, grain):
                kept.append(Snapshot.of(state))
            if step not in wanted:
                return
            if step not in self.curve:
                self.curve[step] = self.measure(state)
            if step in known and step > begin.step and self.differs is None:
                self.differs = self.replay.differs(state)
            before[step] = next((each for each in reversed(kept) if each.step <= step - interval - grain), kept[0])
            self.tell(
                Told(
                    f"looking every {grain} steps" if grain > 1 else "looking step by step", step - first, last - first
                )
            )

        self.replay.advance(begin.state(), last, seen=seen)
        return Look(steps, before)

    def _rises(self, steps: Sequence[int]) -> dict[int, float]:
        """The rise of the error after each step but the last: to the higher of the next two."""
        found = {}
        for index, step in enumerate(steps[:-1]):
            found[step] = max(self.error(after) for after in steps[index + 1 : index + 3]) - self.error(step)
        return found


class Look(NamedTuple):
    """A pass over some steps: where it measured, and a state well before each of these."""

    steps: list[int]
    before: Mapping[int, Snapshot]


class Trial:
    """The ranking of a place's rows, and the proof.

    Args:
        snapshot: a state at or before the place.
    """

    def __init__(self, search: Search, place: Place, snapshot: Snapshot, seed: int) -> None:
        self.search, self.place, self.seed = search, place, seed
        self.replay, self.target = search.replay, search.target
        state = self.replay.advance(snapshot.state(), place.start)
        self.start = Snapshot.of(state)

    def held(self) -> tuple[list[RankedRow], Proof]:
        """All rows, the most harmful first, and what leaving the first ones out does."""
        ranked = self.ranked()
        return ranked, self.proof(ranked)

    def ranked(self) -> list[RankedRow]:
        """All rows of the place, the most harmful first."""
        place, replay = self.place, self.replay
        total = place.end - place.start

        def told(done: int) -> None:
            self.search.tell(Told("ranking rows", done, total))

        effects, _ = row_effects(replay, self.target, self.start, place.end, told)
        refs = {step: replay.trainer.batches.refs(step) for step in range(place.start, place.end)}
        names = [source.name for source in replay.trainer.plan.sources]
        rows = [
            RankedRow(step, index, names[refs[step].source[index]], int(refs[step].row[index]), -harm)
            for (step, index), harm in zip(
                rows_of(range(place.start, place.end), effects.shape[1]), effects.reshape(-1).tolist(), strict=True
            )
            if harm != 0
        ]
        return sorted(rows, key=lambda row: (-row.harm, row.step, row.place))

    def proof(self, ranked: Sequence[RankedRow]) -> Proof:
        """The run without the rows ranked first, beside runs without as many random ones."""
        place, original = self.place, self.search.curve[self.place.end].mean
        sizes = [size for size in SIZES if size <= len(ranked) // 4] or [max(1, len(ranked) // 4)]
        total, tried = CONTROLS + len(sizes), []
        for number, size in enumerate(sizes):
            self.search.tell(Told("leaving rows out", number, total))
            tried.append((size, self.without(ranked[:size])))
            if original - tried[-1][1] >= UNDONE * (original - place.before):
                break
        size, without = min(tried, key=lambda each: each[1]) if len(tried) == len(sizes) else tried[-1]
        generator = np.random.default_rng([self.seed, place.start, size])
        controls = []
        for number in range(CONTROLS):
            self.search.tell(Told("leaving random rows out", len(sizes) + number, total))
            chosen = generator.choice(len(ranked), size, replace=False)
            controls.append(self.without([ranked[index] for index in chosen]))
        followed = self.followed(ranked[:size])
        return Proof(size, original, without, tuple(controls), place.before, followed)

    def without(self, rows: Sequence[RankedRow]) -> float:
        """The target's log-loss at the top of the rise, had some rows been left out."""
        state = self.replay.advance(self.start.state(), self.place.end, masks_of(rows))
        return self.search.measure(state).mean

    def followed(self, rows: Sequence[RankedRow]) -> tuple[tuple[int, float, float], ...]:
        """The log-loss for a while after the rise, with and without some rows."""
        interval = self.place.end - self.place.start
        last = min(self.place.end + FOLLOWED * interval, self.replay.checkpoints[-1].step)
        wanted = {*range(self.place.end, last, max(1, interval // 2)), last}
        found: list[dict[int, float]] = []
        for masks in ({}, masks_of(rows)):
            losses: dict[int, float] = {}

            def seen(state: TrainState, losses: dict[int, float] = losses) -> None:
                if int(state.step) in wanted:
                    losses[int(state.step)] = self.search.measure(state).mean

            self.replay.advance(self.start.state(), last, masks, seen)
            found.append(losses)
        return tuple((step, found[0][step], found[1][step]) for step in sorted(wanted))


def masks_of(rows: Sequence[RankedRow]) -> Masks:
    """Rows to leave out, by step."""
    masks: dict[int, list[int]] = {}
    for row in rows:
        masks.setdefault(row.step, []).append(row.place)
    return masks


def _described(replay: Replay, ranked: Sequence[RankedRow], accused: int) -> tuple[RankedRow, ...]:
    """The first rows of a ranking with their texts."""
    shown = []
    for number, row in enumerate(ranked[: max(MOST_SHOWN, accused)]):
        text = replay.text(row.step, row.place)
        shown.append(RankedRow(row.step, row.place, row.source, row.row, row.harm, text, number < accused))
    return tuple(shown)


def _place(place: Place) -> Json:
    numbers = {name: finite(value) for name, value in place._asdict().items()}
    return {**numbers, "start": place.start, "end": place.end}


def to_json(found: Bisection) -> Json:
    """Everything as JSON holds it."""
    place, proof = found.place, found.proof
    return {
        "run": found.run,
        "target": found.target,
        "kind": found.kind,
        "count": found.count,
        "verdict": found.word,
        "window": list(found.window),
        "interval": None if place is None or found.word in ("evenly", "kept") else [place.start, place.end],
        "steepest": None if place is None else _place(place),
        "candidates": found.num_rows,
        "accused": len(found.accused),
        "rows": [
            {"rank": rank, **{name: getattr(row, name) for name in RankedRow.__dataclass_fields__}}
            for rank, row in enumerate(found.rows, 1)
        ],
        "proof": None
        if proof is None
        else {
            "size": proof.size,
            "with": finite(proof.original),
            "without": finite(proof.without),
            "before": finite(proof.before),
            "controls": [finite(each) for each in proof.controls],
            "beats_all": proof.beats_all,
            "undone": finite(proof.undone),
            "deviations": finite(proof.deviations),
            "followed": [[step, finite(one), finite(two)] for step, one, two in proof.followed],
        },
        "curve": [
            {"step": step, "loss": finite(loss), "error": finite(wrong), "accuracy": right}
            for step, loss, wrong, right in found.curve
        ],
        "steps_taken": found.steps_taken,
        "measurements": found.measured,
        "notes": list(found.notes),
    }
