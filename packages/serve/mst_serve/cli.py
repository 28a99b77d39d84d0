"""The command mst-serve."""

from mst_core.cli import run
from mst_serve.spec import ServeSpec


def main() -> None:
    """Entry point of ``mst-serve``."""
    run(
        {"serve": (ServeSpec, "mst_serve.plan:plan", "mst_serve.work:work")},
        prog="mst-serve",
        description="Serve a checkpoint over the OpenAI API.",
        default="serve",
    )


if __name__ == "__main__":
    main()
