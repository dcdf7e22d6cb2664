"""What became of each task: learned in its stage, known before it, or neither; forgotten since or not; in a sentence.

A change is judged by paired differences over the same documents or questions. Where an evaluation did not keep them,
as in runs of earlier versions, nothing is claimed.

- accuracy: *learned* is above both chance and the majority class after its own stage, and never one answer for all;
- losses: *learned* is a paired gain from before its stage to after it, of at least a hundredth;
- *known before* is what was good before its stage and did not get better in it: an accuracy above chance and majority,
  a loss at least a tenth below that of a model for which everything is equally likely;
- *forgotten* is what was learned or known before and has become worse since, by its paired interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.evaluation.harness_tasks import is_harness
from holdfast.evaluation.matrix import LOWER_IS_BETTER, Cell, Interval, ScoreMatrix
from holdfast.evaluation.results import FOLDER, answers_of, file_name, read_examples
from holdfast.evaluation.sums import EMA, WEIGHTS, Change, TaskSums, read_sums
from holdfast.report.drawing.chart import number
from holdfast.report.pictures.axis import told
from holdfast.report.run_files import Run

UNITS = {
    "accuracy": "accuracy",
    "rouge_l": "ROUGE-L",
    "sari": "SARI",
    "similarity": "similarity",
    "bits_per_byte": "bits per byte",
    "nll": "nats per token",
}
ORDER = tuple(UNITS)
KNOWN = 0.9  # of the loss of a model that knows nothing: an untrained model comes near it, never below this
GAIN = 0.01  # of the loss before: pairing sees far smaller gains, which nobody would call learned
WORDS = ("learned", "known before", "forgotten", "not learned", "not judged", "waiting")


@dataclass(frozen=True)
class Verdict:
    """One task in one measure; every figure in the measure's own unit and direction.

    Args:
        home: the name of its stage; empty where it has none, and before training is what it is compared with.
        before: its score before its stage began, `after` at the end of it, `now` at the latest evaluation.
        word: one of `WORDS`; `waiting` where its stage is still to come, `not judged` where nothing could be paired.
        own: the word for its own stage, before anything could be forgotten: what `forgotten` says was lost.
        known_before: it was good before its stage began, whether or not it got better in it.
        since: the score that `change` starts from, `after`, or `before` where its own stage made it worse.
        change: now minus that score; None where nothing came after it yet.
        interval: of the change, 95 %, paired; None where nothing could be paired.
        num: how many of `unit` the interval is over (documents, rows of a single document, questions, groups).
    """

    task: str
    measure: str
    home: str
    before: Cell
    after: Cell
    now: Cell
    word: str
    own: str = ""
    known_before: bool = False
    since: str = "after"
    change: Cell = None
    interval: Interval | None = None
    num: int = 0
    unit: str = ""

    @property
    def lower_is_better(self) -> bool:
        """The direction of its measure."""
        return self.measure in LOWER_IS_BETTER

    @property
    def scores(self) -> str:
        """Its way from before its stage to after it, in figures."""
        return way(self.measure, self.before, self.after)

    @property
    def start(self) -> Cell:
        """The score that the change starts from."""
        return self.before if self.since == "before" else self.after

    @property
    def lost(self) -> str:
        """The way from there to now, with the paired interval of the change."""
        return way(self.measure, self.start, self.now) + (f", {self.changed}" if self.change is not None else "")

    @property
    def changed(self) -> str:
        """The change with its interval and what that is over: `+0.42 [0.40, 0.44] over 64 documents`."""
        if self.change is None:
            return "–"
        if self.interval is None:
            return f"{signed(self.change)} (not paired)"
        low, high = (signed(end) for end in self.interval)
        return f"{signed(self.change)} [{low}, {high}] over {self.num} {self.unit}"


def signed(value: float) -> str:
    """A change with its sign.

    >>> signed(0.25), signed(-1.0)
    ('+0.25', '-1')
    """
    return f"{'+' if value > 0 else ''}{number(value, 3)}"


def way(measure: str, *scores: Cell) -> str:
    """Scores one after the other, in their unit; equal neighbours once.

    >>> way("bits_per_byte", 8.1, 3.5), way("accuracy", 0.5, 0.5)
    ('bits per byte 8.1 → 3.5', 'accuracy 0.5')
    """
    texts = [number(score, 3) for score in scores if score is not None]
    kept = [text for index, text in enumerate(texts) if index == 0 or text != texts[index - 1]]
    return f"{UNITS[measure]} {' → '.join(kept)}"


def main_measure(matrix: ScoreMatrix, task: str) -> str | None:
    """The measure that a task is judged by: accuracy where it has one, else bits per byte, else NLL."""
    column = matrix.tasks.index(task)
    for measure in ORDER:
        if any(row[column] is not None for row in matrix.measures.get(measure, ())):
            return measure
    return None


def verdicts(run: Run) -> list[Verdict]:
    """What became of every task that has a stage of its own, and of what is only measured and was known before."""
    matrix = run.matrix
    if matrix is None:
        return []
    rows = sorted({point.row for point in run.points if point.row is not None})
    made = []
    for task, home in zip(matrix.tasks, matrix.homes, strict=True):
        measure = main_measure(matrix, task)
        if home is not None and measure is not None and rows:
            made.append(_Judge(run, matrix, task, measure).verdict(home, rows[-1]))
        elif measure is not None and rows and (measure != "accuracy" or is_harness(task)):
            found = _Judge(run, matrix, task, measure).watched(rows[-1])
            made += [] if found is None else [found]
    return made


@dataclass(frozen=True)
class _Judge:
    """One task of a run in one measure."""

    run: Run
    matrix: ScoreMatrix
    task: str
    measure: str

    def verdict(self, home: int, last: int) -> Verdict:
        before, after, now = (self._score(row) for row in (home - 1, home, last))
        stage = self.matrix.stages[home - 1]
        scores = (self.task, self.measure, stage, before, after, now)
        if after is None or now is None:
            return Verdict(*scores, "waiting")
        gained = self._change(home - 1, home)
        known = self._known(home - 1)
        # What its own stage made worse was lost there, not after it.
        start = home - 1 if known and self._worse(gained) else home
        own = word = self._word(home, gained, known)
        begin = before if start < home else after
        change = now - begin if start < last and begin is not None else None
        paired = self._change(start, last) if change is not None else None
        if word in ("learned", "known before") and self._worse(paired):
            word = "forgotten"
        since = "before" if start < home else "after"
        verdict = Verdict(*scores, word, own, bool(known), since, change)
        if paired is None:
            return verdict
        return replace(verdict, interval=(paired.low, paired.high), num=paired.num, unit=paired.unit)

    def watched(self, last: int) -> Verdict | None:
        """What became of what no stage trains on (`eval/held_out`, `harness:NAME`), if the model knew it before."""
        before, now = self._score(0), self._score(last)
        if last == 0 or before is None or now is None or not self._known(0):
            return None
        paired = self._change(0, last)
        word = "forgotten" if self._worse(paired) else "known before"
        scores = (self.task, self.measure, "", before, before, now)
        verdict = Verdict(*scores, word, "known before", True, "before", now - before)
        if paired is None:
            return verdict
        return replace(verdict, interval=(paired.low, paired.high), num=paired.num, unit=paired.unit)

    def _word(self, home: int, gained: Change | None, known: bool | None) -> str:
        """What is to be said of its own stage."""
        rose = self._rose(home, gained)
        if self.measure == "accuracy":
            point = self.run.row_point(home)
            above = point.above_level(self.task) if point is not None else None
            if above is None and not known:
                return "not judged"
            good = bool(above)
        else:
            if gained is None and not known:
                return "not judged"
            good = rose
        if known and not rose:
            return "known before"
        return "learned" if good else "not learned"

    def _rose(self, home: int, gained: Change | None) -> bool:
        """Whether its own stage made it better."""
        if gained is None:
            return False
        if self.measure not in LOWER_IS_BETTER:
            return gained.low > 0
        return gained.high < 0 and -gained.mean >= GAIN * (self._score(home - 1) or 0.0)

    def _known(self, row: int) -> bool | None:
        """Whether it was good at a row of the matrix; None where that cannot be said."""
        point = self.run.row_point(row)
        if point is None:
            return None
        if self.measure == "accuracy":
            return point.above_level(self.task)
        score = point.scores.get(self.task, {}).get(self.measure)
        uniform = point.facts.get(self.task, {}).get("uniform", {}).get(self.measure)
        return None if score is None or uniform is None else score < KNOWN * uniform

    def _worse(self, change: Change | None) -> bool:
        if change is None:
            return False
        return change.low > 0 if self.measure in LOWER_IS_BETTER else change.high < 0

    def _score(self, row: int) -> Cell:
        return self.matrix.measures[self.measure][row][self.matrix.tasks.index(self.task)]

    def _change(self, first: int, second: int) -> Change | None:
        """The paired change between two rows of the matrix, where both evaluations kept their sums."""
        points = self.run.row_point(first), self.run.row_point(second)
        if points[0] is None or points[1] is None:
            return None
        one, two = (sums_at(self.run, point.step, self.task) for point in points if point is not None)
        return one.change(two, self.measure)


def sums_at(run: Run, step: int, task: str) -> TaskSums:
    """What the scores of a task at a step are made of; of earlier versions' runs the questions alone."""
    folder = run.path / FOLDER / str(step)
    sums = read_sums(folder, EMA if run.is_ema else WEIGHTS).get(task)
    if sums is not None or run.is_ema:
        return sums or TaskSums()
    try:
        return TaskSums(answers=answers_of(read_examples(folder / file_name(task))))
    except (OSError, ValueError, KeyError, TypeError):
        return TaskSums()


def sentence(run: Run, found: Sequence[Verdict] | None = None) -> str:
    """What was learned, what was known before and what was forgotten, in one sentence."""
    found = verdicts(run) if found is None else found
    timeline = run.timeline
    head = {
        "finished": "Finished",
        "running": f"Still running, at {_share(run)}",
        "unfinished": f"Unfinished, stopped at {_share(run)}",
    }[run.state]
    if not found:
        stages = len(timeline.stages)
        return f"{head}: {stages or 'no'} stage{'s' if stages != 1 else ''}; nothing was evaluated."
    return f"{head}: {'; '.join(_parts(found))}."


def _parts(found: Sequence[Verdict]) -> list[str]:
    lost = [each for each in found if each.word == "forgotten"]
    known = [each for each in found if each.own == "known before"]
    learned = [each for each in found if each.own == "learned"]
    missed = [each for each in found if each.word == "not learned"]
    unjudged = [each for each in found if each.word == "not judged"]
    waiting = [each for each in found if each.word == "waiting"]
    parts = []
    if known:
        parts.append(f"knew {told([f'{each.task} ({way(each.measure, each.before)})' for each in known])} before")
    if learned:
        parts.append(f"learned {told([f'{each.task} ({each.scores})' for each in learned])}")
    elif not known and not unjudged:
        parts.append("learned nothing that shows")
    if lost:
        parts.append(f"forgot {told([f'{each.task} ({each.lost})' for each in lost])}")
    elif any(each.interval is not None for each in found):
        parts.append("forgot nothing that shows")
    if missed:
        parts.append(f"did not learn {told([f'{each.task} ({each.scores})' for each in missed])}")
    if unjudged:
        ways = [f"{each.task} ({way(each.measure, each.before, each.after, each.now)})" for each in unjudged]
        parts.append(f"no claim, for want of sums to pair, about {told(ways)}")
    if waiting:
        parts.append(f"still to come {told([each.task for each in waiting])}")
    return parts


def _share(run: Run) -> str:
    total = run.timeline.total_steps
    return f"step {run.step:,} of {total:,}" if total else f"step {run.step:,}"
