"""lm-evaluation-harness: its tasks on our models (extra `harness`).

`HarnessModel` answers the harness's three kinds of request with the functions that our own evaluations use. Context and
continuation are cut into tokens as the harness does it for models of `transformers`, so that an exported checkpoint
has the same numbers there. The end-of-text token counts in no continuation, as everywhere in the harness.

Where several processes share a model, the first runs the harness and tells the others what it asks, so that all of
them compute it together; what came of it is shared.
"""

import contextlib
import dataclasses
import io
import logging
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax
import numpy as np

from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import RunError, UserError
from holdfast.evaluation import choice, statistics
from holdfast.evaluation.decoding import Sampler, generate_tokens
from holdfast.evaluation.forward import Runner
from holdfast.evaluation.harness_tasks import HarnessTask, import_harness, task_manager
from holdfast.evaluation.results import MEASURES, Example, TaskResult, numbers, task_result
from holdfast.evaluation.sums import HeldOut, TaskSums
from holdfast.evaluation.texts import text_losses
from holdfast.execution import processes
from holdfast.types import Json, JsonView, Tree

MAX_NEW_TOKENS = 256  # where a task does not say
SHARE_SECONDS = 3600  # that processes wait for the first, which may have to download a task's data
JUDGED_BY = ("acc", "exact_match")  # what says of one question whether it was answered rightly
NAMES = {"acc": "accuracy", "exact_match": "accuracy", "acc_norm": "accuracy_norm"}
SAME = 1e-9  # between a figure of the harness and the mean of its questions

Request = Sequence[Any]  # the arguments of one request


class Answering(Protocol):
    """What answers the harness's kinds of request."""

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]: ...
    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]: ...
    def generate_until(self, requests: Sequence[Request]) -> list[str]: ...


class HarnessModel:
    """A model with its parameters, as the harness asks for it; `as_lm` makes it one of the harness's own classes."""

    def __init__(self, runner: Runner, params: Tree, tokenizer: Tokenizer, batch_size: int = 32) -> None:
        self.runner = runner
        self.params = params
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Log-likelihood of each (context, continuation), and whether greedy decoding gives it.

        Continuations of one context are one question, as long as they fit without cutting the context.
        """
        block_size, eot_id = self.runner.model.block_size, self.tokenizer.eot_id
        pairs = encode_pairs(self.tokenizer, requests)
        groups: dict[Any, list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            fits = len(context) + len(continuation) <= block_size + 1
            groups.setdefault(tuple(context) if fits else index, []).append(index)
        members = list(groups.values())
        asked = [
            choice.question(pairs[part[0]][0], [pairs[index][1] for index in part], block_size, eot_id)
            for part in members
        ]
        results: dict[int, tuple[float, bool]] = {}
        for part, scores in zip(members, choice.score(self.runner, self.params, asked, self.batch_size), strict=True):
            for index, total, greedy in zip(part, scores.log_likelihood, scores.greedy, strict=True):
                results[index] = (float(total), bool(greedy))
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Log-likelihood of each whole text, in windows of a block when it is longer."""
        texts = [str(request[0]) for request in requests]
        losses = text_losses(self.runner, self.params, self.tokenizer, texts, self.batch_size)
        return [-float(loss.nats.sum()) for loss in losses]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """What the model says after each context, up to the first of the request's stop texts."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request[1].items())), []).append(index)
        results: dict[int, str] = {}
        for part in groups.values():
            settings = requests[part[0]][1]
            stops = settings.get("until") or []
            stops = [stops] if isinstance(stops, str) else [text for text in stops if text]
            said = self._generate([requests[index][0] for index in part], settings, stops)
            results |= dict(zip(part, said, strict=True))
        return [results[index] for index in range(len(requests))]

    def _generate(self, contexts: Sequence[str], settings: JsonView, stops: Sequence[str]) -> list[str]:
        sampled = settings.get("do_sample", settings.get("temperature", 0) > 0)
        sampler = Sampler(
            float(settings.get("temperature", 1.0)) if sampled else 0.0,
            int(settings.get("top_k", 0)) if sampled else 0,
            float(settings.get("top_p", 1.0)) if sampled else 1.0,
        )

        def stop(ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids)
            return any(each in text for each in stops)

        # A context is worth more than the room for an answer that will hardly be so long.
        longest = max(self.runner.model.block_size // 2, 1)
        made = generate_tokens(
            self.runner,
            self.params,
            self.tokenizer,
            self.tokenizer.encode_batch(contexts),
            max_new_tokens=min(int(settings.get("max_gen_toks", MAX_NEW_TOKENS)), longest),
            sampler=sampler,
            batch_size=self.batch_size,
            stop=stop,
        )
        return [cut(self.tokenizer.decode(ids), stops) for ids in made]


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of several stop texts.

    >>> cut("a b. c", [".", "b"])
    'a '
    """
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def encode_pairs(tokenizer: Tokenizer, requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each context and of its continuation.

    The whole is encoded and cut after as many tokens as the context has alone; spaces that end a context belong to
    the continuation, with whose first word they make a token.
    """
    texts = []
    for context, continuation in (request[:2] for request in requests):
        bare = context.rstrip()
        texts += [bare, context + continuation] if bare else ["", continuation]
    encoded = iter(tokenizer.encode_batch(texts))
    return [(context, whole[len(context) :]) for context, whole in ((next(encoded), next(encoded)) for _ in requests)]


def as_lm(model: Answering) -> Any:
    """The model as an `lm_eval.api.model.LM`."""
    base: Any = import_harness("lm_eval.api.model", "--harness").LM

    class HoldfastLM(base):  # type: ignore[misc]  # the harness is optional, so its class is known only now
        """Hands the arguments of requests to a `HarnessModel`."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return model.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return model.loglikelihood_rolling([request.args for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return model.generate_until([request.args for request in requests])

    return HoldfastLM()


def run_harness(
    model: Answering,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
) -> Json:
    """Results of the harness's tasks, as `lm_eval.simple_evaluate` gives them, with the seeds that it has itself.

    Args:
        limit: examples per task; None is all.
        include_path: folder with task definitions of one's own.
    """
    if not tasks:
        raise UserError("--harness: no task is named; `lm_eval ls tasks` lists them")
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--harness-tasks {include_path}: there is no such folder")
    tasks_module = import_harness("lm_eval.tasks", "--harness")
    manager = tasks_module.TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"--harness {', '.join(unknown)}: the harness has no such task; `lm_eval ls tasks` lists them")
    try:
        results: Json = import_harness("lm_eval", "--harness").simple_evaluate(
            model=as_lm(model), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager
        )
    except OSError as error:  # of the hub, or of files that a definition names
        raise UserError(f"--harness {', '.join(tasks)}: the harness cannot read a task's data: {error}") from error
    return results


def _evaluate(model: Answering, task: HarnessTask, limit: int | None) -> Json:
    """What `simple_evaluate` does for one task, without what it looks up about the machine and without a bootstrap.

    The task is read anew each time: some draw from a random generator while they are read, and every evaluation
    of a run must ask the same.
    """
    defaults: Any = import_harness("lm_eval.defaults", task.name)
    evaluator: Any = import_harness("lm_eval.evaluator", task.name)
    with _seeded(defaults.DEFAULT_RANDOM_SEED, defaults.DEFAULT_OTHER_SEED):
        loaded = task_manager(task, at=task.name).load([task.task])
        for each in loaded["tasks"].values():
            own = each.get_config("num_fewshot")
            if own is None or (task.num_fewshot is not None and own != 0):  # 0 is a task that takes none
                each.set_config(key="num_fewshot", value=task.num_fewshot or 0)
            each.set_fewshot_seed(seed=defaults.DEFAULT_OTHER_SEED)
        results: Json = evaluator.evaluate(as_lm(model), loaded, limit=limit, bootstrap_iters=0)
    return results


@contextlib.contextmanager
def _seeded(seed: int, other: int) -> Iterator[None]:
    """The global generators with the harness's own seeds, and as they were afterwards."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(other)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def evaluate_task(model: HarnessModel, task: HarnessTask, limit: int | None = None) -> TaskResult:
    """The figures of one task; one that fails has none, and says why.

    Args:
        limit: questions, the first ones; None is all.
    """

    def work(asked: Answering) -> Json:
        with _quietly():
            return reduced(_evaluate(asked, task, limit), task.task)

    found = _on_all(model, work)
    if "failed" in found:
        return TaskResult(task.name, dict.fromkeys(MEASURES), kind="harness", failed=found["failed"])
    return _figures(task.name, found, model.tokenizer)


class _Silenced(io.TextIOBase):
    """A standard error on which one thread is not heard: the others may have something to say."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the harness's progress bars and hints out of a run's own lines."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(_Silenced(sys.stderr)):
            yield
    finally:
        logger.setLevel(level)


def _on_all(model: HarnessModel, work: Callable[[Answering], Json]) -> Json:
    """What the first process makes of its work with a model that all processes answer with.

    An error of the task is its result; one of the devices ends the run, as everywhere.
    """
    if processes.is_first():
        try:
            found = work(_Announced(model))
        except (jax.errors.JaxRuntimeError, RunError, MemoryError):
            raise
        except Exception as error:  # the harness, `datasets` and a task's own code raise what they like
            found = {"failed": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
        _announce(["found", found])
        return found
    while True:
        kind, told = _announce(None)
        if kind == "found":
            return dict(told)
        try:
            getattr(model, kind)(told)
        except (jax.errors.JaxRuntimeError, RunError, MemoryError):
            raise
        except Exception:  # the first process had it too, and says so
            continue


def _announce(message: list[Any] | None) -> list[Any]:
    heard: list[Any] = processes.gather(message, SHARE_SECONDS)[0]
    return heard


@dataclasses.dataclass(frozen=True)
class _Announced:
    """The model of the first process: tells the others what is asked before it answers."""

    model: HarnessModel

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        _announce(["loglikelihood", [list(each) for each in requests]])
        return self.model.loglikelihood(requests)

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        _announce(["loglikelihood_rolling", [list(each) for each in requests]])
        return self.model.loglikelihood_rolling(requests)

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        _announce(["generate_until", [list(each) for each in requests]])
        return self.model.generate_until(requests)


def reduced(results: JsonView, name: str) -> Json:
    """What is kept of the harness's results for a task, a group or a tag, as JSON holds it.

    A task with several filters has several answers to each question: those of the first filter count.
    """
    leaves: Mapping[str, Sequence[JsonView]] = results["samples"]
    questions = []
    for leaf, samples in leaves.items():
        kind, first = results["configs"][leaf]["output_type"], samples[0]["filter"]
        own = sorted((each for each in samples if each["filter"] == first), key=lambda each: int(each["doc_id"]))
        prefix = "" if len(leaves) == 1 else f"{leaf}/"
        questions += [_question(each, kind, prefix) for each in own]
    if not questions:
        raise ValueError(f"{name} has no questions")
    figures = {
        key: float(value)
        for key, value in results["results"].get(name, {}).items()
        if isinstance(value, (int, float)) and "_stderr" not in key and "," in key
    }
    higher = results.get("higher_is_better", {}).get(name) or {}
    return {"questions": questions, "figures": figures, "higher_is_better": dict(higher)}


def _question(sample: JsonView, kind: str, prefix: str) -> Json:
    """One question and its answer; how many choices it had where that is known, and its loss where it has one."""
    arguments = [[str(each) for each in request[:2]] for request in sample["arguments"]]
    values = {name: sample[name] for name in sample["metrics"]}
    made: Json = {
        "id": f"{prefix}{sample['doc_id']}",
        "prompt": arguments[0][0],
        "target": str(sample["target"]),
        "chosen": None,
        "choices": [],
        "label": None,
        "values": {name: float(value) for name, value in values.items() if isinstance(value, (int, float, np.number))},
        "loss": None,
    }
    responses = sample["filtered_resps"]
    if kind == "multiple_choice":
        return made | _chosen(arguments, [float(each[0]) for each in responses], sample["target"])
    if kind == "generate_until":
        return made | {"chosen": str(responses[0])}
    if kind == "loglikelihood":
        context, continuation = arguments[0]
        loss = {"nll": -float(responses[0][0]), "context": context, "text": continuation}
        return made | {"loss": loss | {"bytes": len(continuation.encode())}}
    counted = values.get("bits_per_byte")  # the log-likelihood, and the bytes that the task counts
    nll, num_bytes = (-counted[0], counted[1]) if isinstance(counted, (tuple, list)) else (-float(responses[0]), 0)
    text = arguments[0][0]
    return made | {"loss": {"nll": float(nll), "context": "", "text": text, "bytes": num_bytes or len(text.encode())}}


def _chosen(arguments: Sequence[Sequence[str]], scores: Sequence[float], target: Any) -> Json:
    """The choices of a question, the one chosen, and the right one; of some tasks the contexts are the choices."""
    contexts, continuations = [each[0] for each in arguments], [each[1] for each in arguments]
    if len(set(contexts)) > 1 and len(set(continuations)) < len(continuations) // 2 + 1:
        half = len(set(continuations)) > 1  # each choice also without its context
        choices = continuations[: len(continuations) // 2] if half else contexts
    else:
        choices = continuations
    scores = scores[: len(choices)]
    label = int(target) if isinstance(target, (int, np.integer)) and 0 <= target < len(choices) else None
    best = max(range(len(choices)), key=lambda index: scores[index])
    named = {} if label is None else {"target": choices[label]}
    return {"choices": choices, "chosen": choices[best], "label": label, "scores": [*scores], **named}


def _figures(name: str, found: JsonView, tokenizer: Tokenizer) -> TaskResult:
    """The result of a task: the harness's figures, with what of them every question says."""
    questions: Sequence[JsonView] = found["questions"]
    judge = next((each for each in JUDGED_BY if all(each in q["values"] for q in questions)), None)
    shared = [each for each in questions[0]["values"] if all(each in q["values"] for q in questions)]
    figures, means = _first_filter(found["figures"]), {}
    for metric in shared:
        mean = math.fsum(q["values"][metric] for q in questions) / len(questions)
        if metric not in figures or abs(figures[metric] - mean) <= SAME:
            means[metric] = figures.get(metric, mean)
    higher = found["higher_is_better"]
    kept = [each for each in means if each != judge and each not in JUDGED_BY and higher.get(each, each in NAMES)]
    examples = [_example(each, judge, kept) for each in questions]
    base = task_result(name, "harness", examples, judged=judge is not None)
    measures = {**base.measures}
    for metric, value in figures.items():
        if metric == judge or (metric not in JUDGED_BY and higher.get(metric, metric in NAMES)):
            measures[NAMES.get(metric, metric)] = value
    sums, intervals = base.sums, dict(base.intervals)
    if judge is not None and judge not in means and sums.answers is not None:  # not the mean over questions
        sums = TaskSums(answers=dataclasses.replace(sums.answers, right=None))
        intervals.pop("accuracy")
    result = dataclasses.replace(base, measures=measures, intervals=intervals, sums=sums, reported=found["figures"])
    if judge is not None:
        counts = [len(each.choices) for each in examples]
        guessing = (statistics.chance(counts) if all(counts) else None) if any(counts) else 0.0
        result = dataclasses.replace(result, chance=guessing)
    return _with_losses(result, questions, tokenizer)


def _first_filter(figures: JsonView) -> dict[str, float]:
    """The figures by metric alone: `metric,filter` of the first filter that each has."""
    made: dict[str, float] = {}
    for key, value in figures.items():
        made.setdefault(key.partition(",")[0], value)
    return made


def _example(question: JsonView, judge: str | None, kept: Sequence[str]) -> Example:
    scores, choices = question.get("scores", []), tuple(question["choices"])
    lengths = [choice.harness_length(text) for text in choices]
    return Example(
        id=question["id"],
        prompt=question["prompt"],
        answer=question["target"],
        chosen=question["chosen"],
        right=judge is not None and question["values"][judge] > 0.5,
        choices=choices,
        label=question["label"],
        scores=numbers(scores),
        normalised=numbers([score / length for score, length in zip(scores, lengths, strict=True)]),
        measures={NAMES.get(name, name): question["values"][name] for name in kept},
    )


def _with_losses(result: TaskResult, questions: Sequence[JsonView], tokenizer: Tokenizer) -> TaskResult:
    """The result with the loss of the texts that a task scores, a row each: nats a token, bits a byte."""
    losses = [each["loss"] for each in questions]
    if not all(losses):
        return result
    pairs = encode_pairs(tokenizer, [(each["context"], each["text"]) for each in losses])
    tokens = np.array([len(continuation) for _, continuation in pairs], float)
    num_bytes, none = np.array([each["bytes"] for each in losses], float), np.zeros(len(losses))
    nll = np.array([each["nll"] for each in losses], float)
    rows = HeldOut(nll, tokens, num_bytes, np.arange(len(losses)), none, none, none)
    taken = {name: value for name, value in rows.measures().items() if value is not None}
    return dataclasses.replace(
        result,
        measures={**result.measures, **taken},
        intervals={**result.intervals, **rows.intervals()},
        num_rows=len(losses),
        num_tokens=int(tokens.sum()),
        sums=TaskSums(rows, result.sums.answers),
        uniform=statistics.uniform_losses(tokenizer.vocab_size, int(tokens.sum()), int(num_bytes.sum())),
    )


def answers(results: JsonView) -> dict[str, tuple[list[Example], float]]:
    """Which questions of each task were answered rightly, and the accuracy of guessing, from what `run_harness` gave.

    Tasks that score no single question as right or wrong (a perplexity, say) are left out.
    """
    found: dict[str, tuple[list[Example], float]] = {}
    for task, samples in results.get("samples", {}).items():
        metric = next((name for name in ("acc", "exact_match") if samples and name in samples[0]), None)
        if metric is None:
            continue
        examples, choices = [], []
        for sample in sorted(samples, key=lambda each: int(each["doc_id"])):
            prompt, likeliest = str(sample["arguments"][0][0]), _likeliest(sample)
            choices.append(len(sample["arguments"]) if metric == "acc" else 0)
            right = float(sample[metric]) > 0.5
            examples.append(Example(str(sample["doc_id"]), prompt, str(sample["target"]), likeliest, right))
        found[task] = (examples, statistics.chance(choices) or 0.0 if metric == "acc" else 0.0)
    return found


def _likeliest(sample: JsonView) -> str:
    """What a model said: the continuation with the highest log-likelihood, or the text that it generated."""
    responses = sample["filtered_resps"]
    if isinstance(responses[0], str):
        return str(responses[0])
    best = max(range(len(responses)), key=lambda index: float(responses[index][0]))
    return str(sample["arguments"][best][1])
