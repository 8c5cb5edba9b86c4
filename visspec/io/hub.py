"""Repositories of the hub, through huggingface_hub and its cache: what is fetched, and what is pushed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # of a repository: owner/name
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # no code, and nothing pickled


def names(text: str) -> bool:
    """Whether a text has the form of a hub id and is no path that is there."""
    return ID.fullmatch(text) is not None and not Path(text).exists()


def fetch(name: str) -> Path:
    """The folder of a repository in the local cache, filled with `WANTED` files if the hub can be asked.

    Raises ValueError if there is none, if it wants a login, or if it is not cached and there is no connection.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED))
    except errors.GatedRepoError:
        why = "asks for a login with access to it (hf auth login)"
    except errors.RepositoryNotFoundError:
        why = "is not on the hub, or is private and asks for a login (hf auth login)"
    except errors.LocalEntryNotFoundError:
        why = "is not in the cache, and the hub could not be reached"
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        why = f"could not be fetched ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    raise ValueError(f"checkpoint: {name} {why}, expected a folder, or a repository of safetensors that can be read")


def require(name: str) -> None:
    """Check within seconds that a repository is in the cache or on the hub: loading it would ask an unreachable hub
    again and again. Raises ValueError if it is not.
    """
    if cached_folder(name) is not None:
        return
    try:
        huggingface_hub.HfApi().model_info(name, timeout=2)
        return
    except errors.GatedRepoError:
        return  # its files say more
    except (errors.HFValidationError, errors.RepositoryNotFoundError):
        why = "is no folder, and no repository of the hub (or a private one: hf auth login)"
    except Exception:  # of the HTTP library, which is not always the same
        why = "is no folder and not in the cache, and the hub could not be reached"
    raise ValueError(f"model: {name} {why}")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in the local cache; None: it is not there. The hub is not asked."""
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (errors.HFValidationError, OSError):  # LocalEntryNotFoundError is one
        return None


def resolve_folder(where: str | Path) -> Path:
    """A folder, or that of a repository by its hub id."""
    return fetch(str(where)) if names(str(where)) else Path(where)


def push(name: str, save: Callable[[Path], Any], private: bool | None = None) -> str:
    """Write a folder by `save` and upload it as repository `name`, which is made if it is not there. Returns its URL.

    Errors are huggingface_hub's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        api = huggingface_hub.HfApi()
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by visspec")
    return str(url)
