"""lm-evaluation-harness: its tasks on our models (extra `harness`).

`HarnessModel` answers the harness's three kinds of request with the functions that our own evaluations use: the same
separate tokenisation of context and continuation, the same scores. The end-of-text token counts in no continuation,
as everywhere in the harness.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.evaluation import choice, statistics
from holdfast.evaluation.decoding import Sampler, generate_tokens
from holdfast.evaluation.forward import Runner
from holdfast.evaluation.results import Example
from holdfast.evaluation.texts import text_losses
from holdfast.types import Json, JsonView, Tree

MAX_NEW_TOKENS = 256  # where a task does not say

Request = Sequence[Any]  # the arguments of one request


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
        encoded = iter(self.tokenizer.encode_batch([text for request in requests for text in request[:2]]))
        pairs = [(next(encoded), next(encoded)) for _ in requests]
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


def as_lm(model: HarnessModel) -> Any:
    """The model as an `lm_eval.api.model.LM`."""
    base: Any = _import("lm_eval.api.model").LM

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
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    seed: int = 0,
) -> Json:
    """Results of the harness's tasks, as `lm_eval.simple_evaluate` gives them.

    Args:
        limit: examples per task; None is all.
        include_path: folder with task definitions of one's own.
    """
    if not tasks:
        raise UserError("--harness: no task is named; `lm_eval ls tasks` lists them")
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--harness-tasks {include_path}: there is no such folder")
    manager = _import("lm_eval.tasks").TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"--harness {', '.join(unknown)}: the harness has no such task; `lm_eval ls tasks` lists them")
    try:
        results: Json = _import("lm_eval").simple_evaluate(
            model=as_lm(model),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except OSError as error:  # of the hub, or of files that a definition names
        raise UserError(f"--harness {', '.join(tasks)}: the harness cannot read a task's data: {error}") from error
    return results


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


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--harness: lm-evaluation-harness cannot be imported ({error}); pip install 'holdfast[harness]'"
        ) from None
