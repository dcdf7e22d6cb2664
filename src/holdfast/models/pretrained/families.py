"""The families of models that are read and written, and which of them a specification belongs to.

A family is four functions in a file of its own. Whether a family can express a specification needs no list of
rules: its config.json is written and read back, and what comes back different is what it cannot express.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UserError
from holdfast.models.config import ModelSpec
from holdfast.models.moe import FREE as FREE_OF_EXPERTS
from holdfast.models.moe import MOE, MoeSpec
from holdfast.models.pretrained import gemma, gpt2, llama, mixtral, neox
from holdfast.models.pretrained.formats import Options, Weight
from holdfast.types import Json, JsonView

# Options of training and of the machine: they are no property of the model.
FREE = ("dropout", "param_dtype", "dtype", "remat", "scan_layers")


@dataclass(frozen=True)
class Family:
    """How one family writes its config.json and its weights.

    Args:
        model_type: its name in config.json.
        architecture: its class in transformers.
        prefix: before the names of all weights but the head's; some files leave it out.
        spec: config.json to a specification, for a block size or for all positions.
        config: a specification to config.json; what it cannot express is lost, which `missing_in` notices.
        weights: our parameters in its tensors.
    """

    model_type: str
    architecture: str
    prefix: str
    spec: Callable[[Options, int | None], ModelSpec]
    config: Callable[[ModelSpec], Json]
    weights: Callable[[ModelSpec], dict[str, Weight]]
    kind: str = ModelSpec.family  # the family of models, of `registry.families`, that it is read into

    def missing_in(self, spec: ModelSpec) -> dict[str, tuple[Any, Any]]:
        """Options of a specification that this family cannot express: asked, and what it has instead."""
        wanted = normalised(spec)
        try:
            back = normalised(self.spec(Options(self.config(spec), self.model_type), None))
        except UserError as error:
            return {str(error): (None, None)}
        pairs = {item.name: (getattr(wanted, item.name), getattr(back, item.name)) for item in dataclasses.fields(spec)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


_TABLE = (
    ("llama", "Llama", llama.spec, llama.config, llama.weights),
    ("mistral", "Mistral", llama.mistral_spec, llama.mistral_config, llama.weights),
    ("qwen2", "Qwen2", llama.qwen2_spec, llama.qwen2_config, llama.weights),
    ("qwen3", "Qwen3", llama.qwen3_spec, llama.qwen3_config, llama.weights),
    ("smollm3", "SmolLM3", llama.smollm3_spec, llama.smollm3_config, llama.weights),
    ("granite", "Granite", llama.granite_spec, llama.granite_config, llama.weights),
    ("phi3", "Phi3", llama.phi3_spec, llama.phi3_config, llama.phi3_weights),
    ("olmo2", "Olmo2", llama.olmo2_spec, llama.olmo2_config, llama.post_norm_weights),
    ("gemma", "Gemma", gemma.spec, gemma.config, llama.weights),
    ("gemma2", "Gemma2", gemma.gemma2_spec, gemma.gemma2_config, llama.post_norm_weights),
    ("gemma3_text", "Gemma3", gemma.gemma3_spec, gemma.gemma3_config, llama.post_norm_weights),
)
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(
            Family(name, f"{theirs}ForCausalLM", "model.", spec, config, weights)
            for name, theirs, spec, config, weights in _TABLE
        ),
        Family("mixtral", "MixtralForCausalLM", "model.", mixtral.spec, mixtral.config, mixtral.weights, MOE),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "model.",
            mixtral.qwen3_spec,
            mixtral.qwen3_config,
            mixtral.qwen3_weights,
            MOE,
        ),
        Family("gpt2", "GPT2LMHeadModel", "transformer.", gpt2.spec, gpt2.config, gpt2.weights),
        Family("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.", neox.spec, neox.config, neox.weights),
    )
}

# Buffers that some versions of transformers store beside the weights, and heads that repeat a tied embedding.
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
HEADS = ("lm_head.weight", "embed_out.weight")


def normalised(spec: ModelSpec) -> ModelSpec:
    """A specification without the options that are no property of the model.

    The order of rotated channels is one of them: weights are stored in the order of halves.
    """
    plain: Json = {name: ModelSpec.__dataclass_fields__[name].default for name in FREE}
    if isinstance(spec, MoeSpec):
        plain |= {name: MoeSpec.__dataclass_fields__[name].default for name in FREE_OF_EXPERTS}
        # Whether loads are evened by a loss is no property of the model; a bias is.
        plain["balance"] = "bias" if spec.balance == "bias" else "loss"
    if spec.positions != "rotary":
        plain |= {name: item.default for name, item in ModelSpec.__dataclass_fields__.items() if "rope" in name}
    return dataclasses.replace(spec, **{**plain, "rope_interleaved": False})


def family_of(config: JsonView, where: Any) -> Family:
    """The family that a config.json names."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{where}: model_type: got {str(name)[:120]!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(spec: ModelSpec, name: str | None = None) -> Family:
    """The first family that can express a specification, or the named one if it can."""
    if name is not None and name not in FAMILIES:
        raise UserError(f"there is no family {name!r}; known: {', '.join(FAMILIES)}")
    known = [family.model_type for family in FAMILIES.values() if family.kind == spec.family]
    if not known:
        raise UserError(f"a model of the family {spec.family} has no form that other programs know")
    if name is not None and name not in known:
        raise UserError(
            f"the model cannot be exported as {name}: it is of the family {spec.family}, known for {', '.join(known)}"
        )
    asked = [FAMILIES[model_type] for model_type in ([name] if name else known)]
    missing = {family.model_type: family.missing_in(spec) for family in asked}
    nearest = min(missing, key=lambda each: len(missing[each]))
    if not missing[nearest]:
        return FAMILIES[nearest]
    lines = [
        f"  architecture/{option}: is {ours!r}, {nearest} has {theirs!r}" if (ours, theirs) != (None, None) else option
        for option, (ours, theirs) in missing[nearest].items()
    ]
    who = (
        f"the family {nearest} cannot express this model:" if name else f"no family can express it, not even {nearest}:"
    )
    raise UserError(f"the model cannot be exported, {who}\n" + "\n".join(lines))
