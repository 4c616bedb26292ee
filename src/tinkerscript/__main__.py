"""Run the `tinkerscript` command as `python -m tinkerscript`."""

from tinkerscript.cli import app


def main() -> None:
    app()


if __name__ == "__main__":
    main()
