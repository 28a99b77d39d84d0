"""What is known of each architecture, as data. A new family is one file here and one entry below."""

from __future__ import annotations

from mst_core.errors import InputError
from mst_core.families.baichuan import BAICHUAN, BAICHUAN1
from mst_core.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mst_core.families.gemma import GEMMA2, GEMMA3
from mst_core.families.glm import GLM, GLM4
from mst_core.families.glm_moe import GLM4_MOE
from mst_core.families.gpt_oss import GPT_OSS
from mst_core.families.internlm import INTERNLM2, INTERNLM3
from mst_core.families.llama import LLAMA, YI
from mst_core.families.mistral import MISTRAL
from mst_core.families.mixtral import MIXTRAL
from mst_core.families.ops import Region, pack_rows, unpack_rows
from mst_core.families.phi import PHI3
from mst_core.families.qwen2 import QWEN2
from mst_core.families.qwen3 import QWEN3
from mst_core.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from mst_core.families.qwen_vl import QWEN2_5_VL, QWEN2_VL
from mst_core.families.rules import (
    Config,
    Dims,
    Family,
    Model,
    Reading,
    Rule,
    Where,
    check_labels,
    tasks,
)
from mst_core.families.task import Task, TensorSpec, pack, padded_vocab, unpack

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    YI,
    MISTRAL,
    QWEN2,
    QWEN3,
    INTERNLM2,
    INTERNLM3,
    BAICHUAN,
    BAICHUAN1,
    PHI3,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    QWEN2_VL,
    QWEN2_5_VL,
)

LOGITS = "logits in megatron-core equal transformers'"
AS_LLAMA = "its keys, and the same weights written as the equivalent Llama"
NO_POST_NORMS = "its keys: megatron-core has no norm after attention or MLP"
PROOFS: dict[str, str] = {
    **{family.name: LOGITS for family in FAMILIES},
    **dict.fromkeys(("yi", "internlm2", "internlm3", "baichuan", "baichuan1"), AS_LLAMA),
    **dict.fromkeys(("gemma2", "gemma3", "glm4"), NO_POST_NORMS),
}
"""What a test holds of each family (tests/oracle/test_families*.py, tests/core/test_families_dense.py)."""

__all__ = [
    "FAMILIES",
    "PROOFS",
    "Config",
    "Dims",
    "Family",
    "Model",
    "Reading",
    "Region",
    "Rule",
    "Task",
    "TensorSpec",
    "check_labels",
    "family_for",
    "is_classifier",
    "pack",
    "pack_rows",
    "padded_vocab",
    "tasks",
    "unpack",
    "unpack_rows",
]


def is_classifier(config: Config) -> bool:
    """Whether config.json is a sequence classifier's; of one label and a known family it is a reward model."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def family_for(config: Config, where: Where = "config.json") -> Family:
    """The family of a config.json: by its architecture's name, or by model_type where it names none."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InputError(f"architectures must be a list of names, found {named!r:.80}", where=where)
    known = ", ".join(family.architecture for family in FAMILIES)
    for family in FAMILIES:
        if named and named[0] and named[0] in (family.architecture, family.reward):
            return family
        if not named and config.get("model_type") == family.model_type:
            return family
    found = named[0] if named else config.get("model_type")
    if found is None:
        raise InputError("names no architecture and no model_type", where=where, hint=f"known: {known}")
    raise InputError(f"architecture {found} is not known", where=where, hint=f"known: {known}")
