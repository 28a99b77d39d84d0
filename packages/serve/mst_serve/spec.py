"""The settings of mst-serve."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from mst_core.spec import Spec


class ServeSpec(Spec):
    """Serve a checkpoint over the OpenAI API."""

    model: str = Field(description="Hugging Face directory to serve, or hf://org/name@revision, ms://...")
    host: str = Field("127.0.0.1", description="address to listen on; there is no authentication, so loopback")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 chooses a free one")
    served_model_name: str | None = Field(
        None, min_length=1, description="name that clients give as model (default: the directory's name)"
    )
    backend: Literal["transformers"] = Field("transformers", description="engine that runs the model")
    precision: Literal["fp32", "bf16"] | None = Field(
        None, description="weights and arithmetic (default: fp32 on a CPU, bf16 on a GPU)"
    )
    seq_length: int | None = Field(
        None,
        ge=2,
        validation_alias=AliasChoices("seq_length", "context"),
        description="longest prompt plus answer in tokens (default: what the config allows)",
    )
    max_concurrency: int = Field(16, ge=1, description="answers generated at the same time")
    max_queue: int = Field(64, ge=0, description="answers that may wait for a slot; more get status 429")
    stop_timeout: int = Field(
        30, ge=0, description="seconds that running requests have to finish after SIGTERM or Ctrl-C"
    )
