"""From a name to an optimizer: clipping, then the direction, then decoupled weight decay, then the learning rate.

The learning rate is applied outside the transformation, from the global step: an optimizer that is reset at
a stage boundary starts its own count again, and the schedule must not follow it.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import registry
from holdfast.optim.config import OptimConfig
from holdfast.types import Tree

if TYPE_CHECKING:
    import optax


# Which parameters decay goes by name, because scanned layers give even a bias two axes.
_NO_DECAY_NAME = re.compile(r"(^|_)(bias|scale|gamma|beta|b)$|^bias_|^b_")
_NO_DECAY_MODULE = re.compile(r"norm|(^|_)ln(_|$|\d)")
_NOT_INSIDE = re.compile(r"embed|^w[tp]e$|head$|unembed")


def path_names(path: Any) -> list[str]:
    """The keys of a parameter's path in lower case, without the attributes of boxes around it."""
    from jax.tree_util import DictKey

    return [str(entry.key).lower() for entry in path if isinstance(entry, DictKey)]


def decays(path: Any, leaf: Any) -> bool:
    """Whether weight decay applies to the parameter at a key path: kernels and embeddings yes, norms and biases no."""
    names = path_names(path)
    if leaf.ndim < 2 or any(_NO_DECAY_MODULE.search(name) for name in names):
        return False
    return not (names and _NO_DECAY_NAME.search(names[-1]))


def inner_matrix(path: Any, leaf: Any) -> bool:
    """Whether the parameter at a key path is a matrix inside the model: no embedding, output head, norm or bias."""
    return decays(path, leaf) and not any(_NOT_INSIDE.search(name) for name in path_names(path))


def decay_mask(params: Tree) -> Any:
    """A tree of booleans like the parameters: True where weight decay applies."""
    import jax

    return jax.tree_util.tree_map_with_path(decays, params)


@dataclass(frozen=True)
class Optimizer:
    """A gradient transformation, and whether the learning rate of the step still multiplies its updates.

    Args:
        transformation: gradients to updates; states are plain pytrees made from the parameters.
        scale_by_schedule: False for a user's own transformation, which carries its learning rate itself.
    """

    transformation: "optax.GradientTransformation"
    scale_by_schedule: bool = True

    def init(self, params: Tree) -> Any:
        """Fresh optimizer state for the parameters."""
        return self.transformation.init(params)

    def update(self, gradients: Tree, state: Any, params: Tree, learning_rate: Any) -> tuple[Any, Any]:
        """The updates to add to the parameters, and the next state.

        Args:
            learning_rate: `schedule(global step)`; not used by a transformation that has its own.
        """
        import jax

        updates, state = self.transformation.update(gradients, state, params)
        if self.scale_by_schedule:
            updates = jax.tree.map(lambda update: learning_rate * update, updates)
        return updates, state


def build_optimizer(
    choice: "str | optax.GradientTransformation", config: OptimConfig, plugin_config: Any = None
) -> Optimizer:
    """The optimizer for a registered name, or a transformation of the user's own, used exactly as it is.

    Args:
        choice: what a trainer's `optimizer()` returned; `config.optimizer` replaces it when set.
        plugin_config: an instance of the optimizer's config class; its defaults unless given.
    """
    choice = config.optimizer or choice
    if not isinstance(choice, str):
        return Optimizer(choice, scale_by_schedule=False)
    make = registry.optimizers.get(choice, path="optimization/optimizer")
    config_class = registry.optimizers.config(choice)
    if plugin_config is None and config_class is not None:
        plugin_config = config_class()
    direction = make(plugin_config) if config_class is not None else make()
    return Optimizer(surround(direction, config))


def surround(direction: "optax.GradientTransformation", config: OptimConfig) -> "optax.GradientTransformation":
    """A descent direction with global-norm clipping before it and decoupled weight decay after it."""
    import optax

    parts = [direction]
    if config.clip_norm:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        # The direction points downhill already, so decay is subtracted.
        parts.append(optax.add_decayed_weights(-config.weight_decay, decay_mask))
    return optax.chain(*parts)


def state_shardings(optimizer: Optimizer, params: Tree, shardings: Any, replicated: Any) -> Any:
    """Shardings of the optimizer's state: like the parameter where the shape is the parameter's, else replicated.

    Args:
        params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
        shardings: one sharding for each parameter.
        replicated: the sharding of counts and of factored moments, which are small.
    """
    import jax
    import optax

    def placed(leaf: Any, param: Any, sharding: Any) -> Any:
        if isinstance(leaf, optax.MaskedNode):  # a part of a partitioned optimizer that leaves this parameter alone
            return leaf
        return sharding if leaf.shape == param.shape else replicated

    return optax.tree_map_params(
        optimizer.transformation,
        placed,
        jax.eval_shape(optimizer.init, params),
        params,
        shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
