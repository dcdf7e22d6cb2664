"""What is carried from step to step: the train state, and how it changes when a stage is entered.

No other module knows what state a stage has: `stage_state` is the one transition, `objective_at` what its steps
minimise; `initial.py` has how a state begins and what a checkpoint of it holds.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state

from holdfast import registry
from holdfast.curriculum import Budget, Curriculum
from holdfast.data.batches import Batch
from holdfast.execution.memory import on_device
from holdfast.methods import Method, ParameterPenalty, StageData, TokenPenalty
from holdfast.methods.active import ActiveMethods
from holdfast.methods.controller import Controller, unmoved
from holdfast.models.family import Losses, Model
from holdfast.models.layers import logits
from holdfast.models.lora import fingerprint
from holdfast.models.moments import input_moments
from holdfast.models.parameters import Lora, Trainable, is_adapter, leaves_of, tree_of
from holdfast.objectives.token_loss import token_nll
from holdfast.optim import Optimizer, Schedule, build_optimizer
from holdfast.training.data import penalty_view
from holdfast.training.placement import AS_PARAMETERS, ReferenceStore, built_like, placed_like, shardings_of, traced
from holdfast.training.resolve import ResolvedRun, schedule_for
from holdfast.types import Json, Tree

NO_METHODS = ActiveMethods({})

# Arrays that checkpoints of earlier versions lack; they are restored with their initial values.
LATER_ARRAYS = ("beta", "kl_mean", "memory", "keep")


@dataclass(frozen=True)
class Objective:
    """What a compiled step minimises and how; a new one means a new compilation, so there is one per stage kind.

    Args:
        model: the choice of model.
        optimizer, schedule: how gradients become updates.
        z_loss: weight of the squared log-normaliser.
        penalty: the anchor that beta weighs, None where the stage has none (no reference forward is compiled then).
        target: KL budget in nats per token, None where beta is fixed.
        trainable: the part of the parameters that is trained, None where that is all of them.
        ema: decay of the average of the trained parameters, 0 where there is none.
        methods: the other methods that act.
        sam: how far uphill gradients are taken (`optimization/sam/rho`), 0 where they are taken where the model is.
        reference_on_old: the loss looks at the reference in old rows alone; where batches have slots, it runs there.
        keep: what steers the budgets of the stage, None where it has none.
        held: where and how the weights of a reference are held.
    """

    model: Model
    optimizer: Optimizer
    schedule: Schedule
    z_loss: float = 0.0
    penalty: TokenPenalty | ParameterPenalty | None = None
    target: float | None = None
    trainable: Trainable | None = None
    ema: float = 0.0
    methods: ActiveMethods = NO_METHODS
    sam: float = 0.0
    reference_on_old: bool = False
    keep: Controller | None = None
    held: ReferenceStore = AS_PARAMETERS

    @property
    def lora(self) -> Lora | None:
        """The adapters, if it is they that are trained."""
        return self.trainable.lora if self.trainable else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss runs the reference's forward pass."""
        anchored = isinstance(self.penalty, TokenPenalty) or self.keep is not None
        return anchored or self.methods.loss_needs_reference

    def trained(self, params: Tree) -> Tree:
        """The part of the parameters that gradients and optimizer state exist for."""
        return params if self.trainable is None else self.trainable.part(params)

    def average_of(self, params: Tree) -> Tree:
        """The average of trained parameters before the first step, in arrays of its own: they themselves."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), self.trained(params))

    def completed(self, params: Tree, trained: Tree) -> Tree:
        """All parameters, with a trained part in the place of theirs."""
        return trained if self.trainable is None else self.trainable.completed(params, trained)


def methods_of(run: ResolvedRun) -> dict[str, Method]:
    """The methods of a run by name, as its trainer declares them."""
    return _declared(run)[0]


def marks_old(run: ResolvedRun) -> bool:
    """Whether batches must say which rows are old."""
    configs = [method.config for method in methods_of(run).values()]
    anchors = [registry.penalties.get(name) for name in run.trainer.penalties(run.options)]
    seen = {config.penalty_tokens for config in configs}
    seen |= {anchor.tokens for anchor in anchors if isinstance(anchor, TokenPenalty)}
    return "new" in seen or any(config.needs_old_gradients or config.needs_old_mask for config in configs)


def objective_at(run: ResolvedRun, stage: int) -> Objective:
    """What the steps of a stage minimise; stages of one kind share one objective, and so one compiled step."""
    methods, objectives = _declared(run)
    acting = tuple(name for name, method in methods.items() if method.config.acts_in(stage))
    names = run.trainer.penalties(run.options) if run.curriculum.stages[stage].beta > 0 else ()
    assert len(names) <= 1, "beta weighs one penalty"
    kept = run.curriculum.budgets_in(stage)
    kind = (names, acting, kept)
    if kind not in objectives:
        plain = next(iter(objectives.values()), None) or _plain_objective(run)
        penalty = registry.penalties.get(names[0]) if names else None
        active = _acting({name: methods[name] for name in acting}, run.curriculum) if acting else NO_METHODS
        controller = _controller(run, kept) if kept else None
        objectives[kind] = dataclasses.replace(
            plain,
            penalty=penalty,
            target=run.options.penalty.target if names else None,
            methods=active,
            reference_on_old=_reference_on_old(run, penalty, active, controller),
            keep=controller,
        )
    return objectives[kind]


def _acting(methods: dict[str, Method], curriculum: Curriculum) -> ActiveMethods:
    edges = _edges(curriculum)
    return ActiveMethods({name: dataclasses.replace(method, edges=edges) for name, method in methods.items()})


def _edges(curriculum: Curriculum) -> tuple[int, ...]:
    return (*(curriculum.stage_start(index) for index in range(len(curriculum.stages))), curriculum.total_steps)


def _controller(run: ResolvedRun, budgets: tuple[Budget, ...]) -> Controller:
    """What steers the budgets of a stage; old rows train by what replayed rows do."""
    curriculum, replay = run.curriculum, run.options.stages.replay
    objective = replay.objective if replay else "both"
    fades = [curriculum.fade_steps(boundary) for boundary in range(len(curriculum.stages) - 1)]
    return Controller(
        budgets,
        cross_entropy=objective != "kl",
        kl=objective != "ce",
        edges=_edges(curriculum),
        fades=tuple((start, end) for start, end in fades if end > start),
    )


def _reference_on_old(
    run: ResolvedRun,
    penalty: TokenPenalty | ParameterPenalty | None,
    methods: ActiveMethods,
    controller: Controller | None,
) -> bool:
    """Whether all that looks at the reference inside the loss looks at old rows alone."""
    if controller is not None:
        others = {each.config.penalty_tokens for each in methods.having("token_penalty").values()}
        return not (others or isinstance(penalty, TokenPenalty) or methods.weights_need_reference)
    view = penalty_view(run)
    if view is None or view.on != "old" or view.replay_objective == "ce" or methods.weights_need_reference:
        return False
    tokens = {each.config.penalty_tokens for each in methods.having("token_penalty").values()}
    tokens |= {penalty.tokens} if isinstance(penalty, TokenPenalty) else set()
    return tokens == {"penalty"}


def stages_with_slots(run: ResolvedRun) -> list[int]:
    """Stages in which something looks at old rows alone, so that it is worth while to know where they lie."""
    objectives = [objective_at(run, stage) for stage in range(len(run.curriculum.stages))]
    return [stage for stage, each in enumerate(objectives) if each.reference_on_old or each.methods.needs_old_gradients]


@functools.lru_cache(maxsize=8)
def _declared(run: ResolvedRun) -> tuple[dict[str, Method], dict[Any, Objective]]:
    """The methods of a run, and its objectives by kind as they are asked for."""
    return dict(run.trainer.methods(run.options)), {}


def _plain_objective(run: ResolvedRun) -> Objective:
    choice, options = run.trainer.optimizer(), run.options
    plugin = options.plugin(registry.optimizers, options.optim.optimizer or choice)
    return Objective(
        model=run.model,
        optimizer=build_optimizer(choice, options.optim, plugin),
        schedule=learning_rate(run),
        z_loss=options.run.z_loss,
        trainable=run.trainable,
        ema=options.run.ema,
        sam=options.optim.sam.rho,
        held=ReferenceStore(options.penalty.reference_memory, options.penalty.reference_dtype),
    )


def learning_rate(run: ResolvedRun) -> Schedule:
    """The learning rate of a run as a function of the step."""
    return schedule_for(run.job, run.options, run.curriculum, run.declared_by)


@dataclass(frozen=True)
class Base:
    """The frozen weights that adapters belong to, which checkpoints do not hold.

    Args:
        fingerprint: of their values.
        source: the checkpoint they come from, `RUN@STEP` relative to the run's folder; None: from the run's options.
        step: at which the adapters were made, when they changed nothing.
    """

    fingerprint: str
    source: str | None = None
    step: int = 0


class TrainState(train_state.TrainState):
    """Parameters, optimizer state, the anchor, methods' memories and counts of skipped updates."""

    skipped: jax.Array  # updates skipped in all, because loss or gradient was not finite
    skipped_in_a_row: jax.Array
    beta: jax.Array  # weight of the anchor; a KL budget moves it
    kl_mean: jax.Array  # running mean of the measured KL as (sum, weight); weight 0 where nothing was measured yet
    objective: Objective = struct.field(pytree_node=False)
    base: Base | None = struct.field(pytree_node=False)  # what the adapters belong to, if there are any
    ema: Tree = None  # average of the trained part in float32, None where there is none
    # Frozen parameters, None while no stage needs them. Beside adapters what the reference has other than the base:
    # nothing, other adapters, or other weights in all.
    reference: Tree = None
    memory: Tree = None  # of methods, by name; None where no method has one
    keep: Tree = None  # what steers budgets, by name (`methods.controller`); None where there is none

    def arrays(self) -> Json:
        """The arrays that a checkpoint holds; what is static is derived from the config and the step."""
        held = {
            "step": self.step,
            "params": self.params if self.base is None else adapters_of(self.params),
            "opt_state": self.opt_state,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "beta": self.beta,
            "kl_mean": self.kl_mean,
        }
        more = {"ema": self.ema, "reference": self.reference or None, "memory": self.memory, "keep": self.keep}
        return held | {name: tree for name, tree in more.items() if tree is not None}

    def trained(self) -> Tree:
        """The part of the parameters that is trained."""
        return self.objective.trained(self.params)

    def trained_reference(self) -> Tree | None:
        """The trained part of the reference; None without one, and beside adapters, which it lacks."""
        if self.reference is None or self.base is not None:
            return None
        return self.objective.trained(self.reference_params())

    def log_likelihoods(self, trained: Tree, micro: Batch) -> jax.Array:
        """Log-likelihood of every target of a micro-batch, (B, T); 0 where there is none."""
        return -self.token_losses(self.objective.completed(self.params, trained), micro)

    def token_losses(self, params: Tree, micro: Batch, key: jax.Array | None = None) -> jax.Array:
        """Negative log-likelihood of every target under any parameters, (B, T); with a key, under dropout."""
        model = self.objective.model
        states, _ = self.hidden_states(params, micro, key)
        targets = jnp.where(micro.padding_mask > 0, micro.y, -1)
        return token_nll(states, model.unembedding(params), targets, softcap=model.softcap)

    def sampled(self, micro: Batch, key: jax.Array) -> Batch:
        """A micro-batch whose targets are drawn from the model itself, given the real tokens before each."""
        model = self.objective.model
        states_BTD, _ = self.hidden_states(self.params, micro)
        states_ND = states_BTD.reshape(-1, states_BTD.shape[-1])
        drawn_N = jax.random.categorical(key, logits(states_ND, model.unembedding(self.params), model.softcap))
        drawn_BT = drawn_N.reshape(micro.y.shape).astype(micro.y.dtype)
        return micro._replace(y=jnp.where(micro.y >= 0, drawn_BT, micro.y))

    def input_moments(self, rows: Batch) -> dict[str, jax.Array]:
        """Mean square of the inputs of every dense kernel over real tokens, as far as it is trained, by its path."""
        model, trainable = self.objective.model, self.objective.trainable
        found: dict[str, jax.Array] = jax.jit(lambda params, rows: input_moments(model, params, rows))(
            self.params, rows
        )
        return found if trainable is None else leaves_of(trainable.part(tree_of(found)))

    def hidden_states(self, params: Tree, micro: Batch, key: jax.Array | None = None) -> tuple[jax.Array, Losses]:
        """Hidden states (B, T, D) of a micro-batch and the model's auxiliary losses; with a key, under dropout."""
        return self.objective.model.hidden(
            params, micro.x, segment_ids=micro.segment_ids, positions=micro.positions, key=key
        )

    def ema_params(self) -> Tree | None:
        """All parameters with the average in the place of what is trained, None where there is no average."""
        if self.ema is None:
            return None
        average = jax.tree.map(lambda mean, own: mean.astype(own.dtype), self.ema, self.trained())
        return self.objective.completed(self.params, average)

    def reference_params(self) -> Tree | None:
        """The parameters of the reference in full, in the device's memory and in their own type; None without one."""
        held = self._held_reference()
        if held is None or self.objective.held == AS_PARAMETERS:
            return held
        types = {path: leaf.dtype for path, leaf in leaves_of(self.params).items()}
        return tree_of({path: leaf.astype(types[path]) for path, leaf in leaves_of(on_device(held)).items()})

    def reference_weights(self) -> Tree | None:
        """The same for a forward pass: as they are held, where the model brings each to the device by itself."""
        return self._held_reference() if self.objective.model.kind.brings_weights else self.reference_params()

    def _held_reference(self) -> Tree | None:
        if self.reference is None or self.base is None:
            return self.reference
        return overlaid(without_adapters(self.params), self.reference)

    def snapshot(self, step: int) -> Self:
        """The state with its present parameters as the reference, an exact copy with the same sharding.

        Beside adapters only those are copied, and nothing where they are new: the base itself is the reference.
        """
        state = self.without_kl()
        if self.base is None:
            return state.replace(reference=self.objective.held.hold(self.params))
        fresh = step == self.base.step
        return state.replace(reference={} if fresh else self.objective.held.hold(adapters_of(self.params)))

    def without_kl(self) -> Self:
        """The state before any KL to its reference was measured."""
        return self.replace(kl_mean=placed_like(no_kl(), self.kl_mean))

    def anchored(self, weights: Tree) -> Self:
        """The state with other weights, without adapters, as the reference; those of the base are not held twice."""
        same = self.base is not None and fingerprint(leaves_of(weights)) == self.base.fingerprint
        return self.replace(reference={} if same else self.objective.held.taken(weights))


class KLDivergenceTrainState(TrainState):
    """Train state carrying a frozen reference-policy snapshot and KL weight: every train state does."""


def stage_state(state: TrainState, run: ResolvedRun, step: int, data: StageData) -> TrainState:
    """The state in which a step is taken: where a stage begins or a snapshot is due, changed; otherwise as it is.

    In this order: methods remember, the snapshot is taken, then beta, objective and a fresh optimizer where the stage
    asks for one; a reference that no later stage needs is dropped. It also works under `jax.eval_shape`.

    Args:
        step: the number of steps that are complete.
        data: rows for methods that remember some, and the reference that the options name.
    """
    curriculum = run.curriculum
    index = curriculum.stage_at(step)
    begins = step == 0 or index != curriculum.stage_at(step - 1)
    if step == 0 and curriculum.initial_reference:
        state = state.anchored(data.initial_reference())
    if begins:
        objective = objective_at(run, index)
        if objective.methods.having("remember"):
            memory = objective.methods.remember(state.memory, state, data)
            state = state.replace(
                memory=memory if traced(memory) else jax.device_put(memory, memory_places(memory, state))
            )
    if step in curriculum.snapshot_steps():
        state = state.snapshot(step)
    if not begins:
        return state
    stage = curriculum.stages[index]
    state = state.replace(objective=objective, beta=placed_like(jnp.float32(stage.beta), state.beta)).without_kl()
    if state.keep is not None:
        begun = {each.name for each in curriculum.budgets if each.since == index or curriculum.is_sampled(each.name)}
        fresh = {name: own if name not in begun else _placed_unmoved(own) for name, own in state.keep.items()}
        state = state.replace(keep=fresh)
    if stage.reset_optimizer:
        fresh = built_like(lambda params: objective.optimizer.init(objective.trained(params)), state.opt_state)
        state = state.replace(opt_state=fresh(state.params))
    return state if curriculum.needs_reference(index) else state.replace(reference=None)


def _placed_unmoved(own: Tree) -> Tree:
    return {name: placed_like(value, own[name]) for name, value in unmoved().items()}


def entered_state(state: TrainState, run: ResolvedRun, stage: int, data: StageData) -> TrainState:
    """The state at the first step of a stage as if the run had come there: for profiles and plans of single stages.

    A stage that needs a reference finds the present weights there.
    """
    first = run.curriculum.stage_start(stage)
    state = state.replace(step=placed_like(jnp.int32(first), state.step))
    if run.curriculum.has_reference(first):
        state = state.snapshot(first)
    return stage_state(state, run, first, data)


def memory_shardings(memory: Tree, trained: Tree, like_params: Tree, replicated: jax.sharding.Sharding) -> Tree:
    """Where a memory lies: as the parameter whose path it ends in where it has its shape, else on every device."""
    known = {
        path: (leaf.shape, placed)
        for (path, leaf), placed in zip(
            jax.tree_util.tree_flatten_with_path(trained)[0], jax.tree.leaves(like_params), strict=True
        )
    }

    def place(path: Tree, leaf: Tree) -> Tree:
        for start in range(len(path)):
            shape, placed = known.get(path[start:], (None, None))
            if shape == leaf.shape:
                return placed
        return replicated

    return jax.tree_util.tree_map_with_path(place, memory)


def memory_places(memory: Tree, state: TrainState) -> Tree:
    """Where memories lie beside the parameters of a state."""
    objective = state.objective
    trained = jax.eval_shape(objective.trained, state.params)
    whole = state.params if objective.trainable is None else objective.trainable.whole(state.params)
    return memory_shardings(memory, trained, shardings_of(whole), state.skipped.sharding)


def no_kl() -> jax.Array:
    """The running mean of nothing."""
    return jnp.zeros(2, jnp.float32)


def adapters_of(params: Tree) -> Tree:
    """The adapters of a tree of parameters."""
    return tree_of({path: leaf for path, leaf in leaves_of(params).items() if is_adapter(path)})


def without_adapters(params: Tree) -> Tree:
    """The base of a tree of parameters."""
    return tree_of({path: leaf for path, leaf in leaves_of(params).items() if not is_adapter(path)})


def overlaid(params: Tree, part: Tree) -> Tree:
    """A tree of parameters with the leaves of another in it."""
    return tree_of({**leaves_of(params), **leaves_of(part)})
