"""How does one command serve a model with another replay mode than its folder names?"""

import json
import os
from pathlib import Path
from typing import Literal

from services.local.home import Home

Replay = Literal["off", "mask", "compact"]
ABOUT = "fathom.json"


def folder_with(home: Home, model: Path, replay: Replay) -> Path:
    """Return a folder like `model` whose fathom.json names this replay mode: itself if it does already.

    Otherwise it is made under `home`, of links to the model's files: the model's own folder is never written to.
    """
    about = _about(model)
    if about.get("replay", "off") == replay:
        return model
    folder = home.models / f"{model.name}+{replay}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name == ABOUT or file.name.startswith("."):
            continue
        link = folder / file.name
        if link.is_symlink() and link.readlink() == file:
            continue
        draft = folder / f".{file.name}.{os.getpid()}"
        draft.symlink_to(file)
        draft.replace(link)
    described = {"name": model.name, **about, "replay": replay}
    draft = folder / f".{ABOUT}.{os.getpid()}"
    draft.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / ABOUT)
    return folder


def _about(model: Path) -> dict[str, object]:
    file = model / ABOUT
    if not file.is_file():
        return {}
    described = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(described, dict):
        raise ValueError(f"{file} is not a JSON object")  # noqa: TRY004 - what a file says is a value
    return described
