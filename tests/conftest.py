"""What every test needs: tiny real models with a real tokenizer, and the commands as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Is this headline satire or news? Area man wins prize for best answer.",
    "Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump!",
    "system user assistant 0123456789 Satire News yes no",
]
DIMS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 32},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test puts there ends with it: mst itself tells torch of its ranks in it (cluster.py), and a later Trainer
    would wait for them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def make_tokenizer(directory: Path, template: str | None = CHATML) -> None:
    """A byte-level BPE tokenizer of about 300 tokens, with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None
    )
    fast.chat_template = template
    fast.save_pretrained(directory)


def make_hf(
    directory: Path,
    family: str = "llama",
    *,
    dtype: str = "float32",
    seed: int = 0,
    template: str | None = CHATML,
    scores: bool = False,
    **dims: Any,
) -> Path:
    """A tiny random model of a family as transformers saves it, norms away from 1, biases away from 0; ``scores``: a
    reward model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory, template)
    settings = {**DIMS, "vocab_size": 330, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0}
    if scores:
        settings["num_labels"] = 1
    config = AutoConfig.for_model(family, **{**settings, **FAMILIES.get(family, {}), **dims})
    torch.manual_seed(seed)
    loader = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = loader.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
            else:
                parameter.copy_(torch.randn(parameter.shape) * (0.08 if "embed" in name else 0.15))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_hf("qwen2", dtype=..., ...)``: a tiny HF directory, made once. Do not change it."""
    made: dict[Any, Path] = {}

    def make(family: str = "llama", **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_hf(tmp_path_factory.mktemp("hf") / family, family, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def mst() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``mst("mst-convert", "--model", ...)``: run a command of this environment, as a user does.

    ``code`` is the exit code to expect (0): any other fails the test with what the command said.
    """

    def run(*words: Any, code: int = 0, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / str(words[0])), *map(str, words[1:])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)
        if done.returncode != code:
            pytest.fail(f"{' '.join(command)}\nexit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}")
        return done

    return run


@pytest.fixture(scope="session")
def slowness() -> float:
    """How much slower this machine is, just now, than an idle one: importing pydantic-settings takes 0.3 s there.

    CPU seconds of two processes on one core's two threads count up to twice, so rules are held in these units.
    """
    script = "import pydantic_settings, resource; used = resource.getrusage(resource.RUSAGE_SELF)\n"
    script += "print(used.ru_utime + used.ru_stime)"
    took = [float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(5)]
    return max(1.0, min(took) / 0.3)
