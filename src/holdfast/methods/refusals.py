"""What a method's options are checked against, and reasons for which several methods refuse a stage. No JAX here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.methods.method import Method, MethodConfig, has_hook

if TYPE_CHECKING:
    from holdfast.curriculum import Curriculum

# Ways to keep the old that `training/methods` does not list, and where they are.
ELSEWHERE = {
    **dict.fromkeys(
        ("kl", "forward", "reverse", "nll_difference", "l2_reference"),
        "set optimization/kl/estimator and a beta (job continual/train/abcd_kl)",
    ),
    **dict.fromkeys(("replay", "self", "self_replay"), "set training/replay"),
    "keep": "set keep/NAME",
    "sam": "set optimization/sam/rho",
    "lines": "`holdfast average RUN@boundary_1 RUN@final --lines 0.5` is what averages",
    "lora": "set optimization/lora/rank",
    "freeze": "set optimization/freeze",
    "ema": "set training/ema",
}

# The same in a line each, as `holdfast jobs` lists them; penalties have a list of their own.
BESIDE = {
    "replay": "rows of earlier data, or that the model samples from itself, in later stages (training/replay)",
    "keep": "a budget in bits per byte that moves the weight of old rows (keep/NAME)",
    "sam": "sharpness-aware minimisation, with any optimizer (optimization/sam/rho)",
    "lora": "adapters are trained, and the model itself is not (optimization/lora/rank)",
    "freeze": "parts of the model are not trained (optimization/freeze)",
    "ema": "an average of the weights over steps (training/ema)",
    "lines": "a step between two checkpoints, scaled by depth (holdfast average --lines)",
}


@dataclass(frozen=True)
class StageFacts:
    """What a method's options are checked against, in one stage in which it acts; needs no JAX.

    Args:
        name: of the method that is asked.
        stage: 0-based.
        curriculum: of the run.
        options: of the run, a `holdfast.training.config.RunOptions`.
        acting: the configs of all methods that act in the stage, by name in the listed order, its own too.
        kinds: their classes.
    """

    name: str
    stage: int
    curriculum: "Curriculum"
    options: Any
    acting: Mapping[str, MethodConfig]
    kinds: Mapping[str, type[Method]]

    @property
    def beta(self) -> float:
        """The weight of the anchor in the stage."""
        return self.curriculum.stages[self.stage].beta

    @property
    def draws_old(self) -> bool:
        """Whether the stage draws rows of earlier stages' sources, by replay or in a fade."""
        return self.curriculum.draws_old(self.stage)

    @property
    def draws_new(self) -> bool:
        """Whether the stage draws rows of a source that no earlier stage has."""
        return self.curriculum.draws_new(self.stage)

    @property
    def counts_cross_entropy(self) -> bool:
        """Whether any row of the stage trains by cross-entropy, not by the anchor alone."""
        replay = self.options.stages.replay
        return self.draws_new or replay is None or replay.objective != "kl"

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters (LoRA) are trained instead of the model."""
        return bool(self.options.optim.lora.rank)

    def others_with(self, hook: str) -> list[str]:
        """The names of the other acting methods that have a hook."""
        return [name for name in self.acting if name != self.name and has_hook(self.kinds[name], hook)]

    def refusal(self, expected: str, fix: str = "") -> ConfigError:
        """The error that refuses the method here.

        Args:
            expected: after "expected": what would have been right, and why this is not.
            fix: how to mend it.
        """
        listed = list(self.options.run.methods)
        # A trainer of the user's own may have methods that no option lists.
        path = f"training/methods/{listed.index(self.name)}" if self.name in listed else "training/methods"
        return ConfigError(path, self.name, expected, fix)


def refuse_first_stage(about: StageFacts) -> None:
    """Refuse a method that looks at rows of the stage before in the first one."""
    if about.stage == 0:
        raise about.refusal(
            "to act from the second stage on: no stage ends before the first, so that it has no rows to look at",
            f"take 0 out of methods/{about.name}/stages",
        )


def refuse_adapters(about: StageFacts, reason: str) -> None:
    """Refuse a method that looks at the model's own weights beside LoRA."""
    if about.trains_adapters:
        raise about.refusal(f"no adapters beside it: {reason}", "set optimization/lora/rank to 0")


def refuse_other_updates(about: StageFacts) -> None:
    """Refuse two methods that change updates in one stage: what one keeps from moving, the other would move."""
    others = about.others_with("updates")
    if others:
        raise about.refusal(
            f"no {others[0]} beside it in stage {about.stage}: what one keeps from moving the other moves again",
            f"let them act in different stages (methods/{about.name}/stages)",
        )
