"""Repositories of the hub, through huggingface_hub and its cache: downloads and uploads."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/name of a repository
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # neither code nor pickles


def names(text: str) -> bool:
    """Return whether a text has the form of a hub id and is not an existing path."""
    return ID.fullmatch(text) is not None and not Path(text).exists()


def fetch(name: str) -> Path:
    """Return the folder of a repository in the local cache, updated with `WANTED` files if the hub is reachable. Raises
    ValueError if the repository does not exist, needs a login, or is neither cached nor reachable.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED))
    except errors.GatedRepoError:
        why = "needs a login with access to it (hf auth login)"
    except errors.RepositoryNotFoundError:
        why = "is not on the hub, or is private and needs a login (hf auth login)"
    except errors.LocalEntryNotFoundError:
        why = "is not in the cache, and the hub could not be reached"
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        why = f"could not be fetched ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    raise ValueError(f"checkpoint: {name} {why}, expected a folder, or a repository of safetensors that can be read.")


def require(name: str) -> None:
    """Raise ValueError within seconds if a repository is not found, since loading would retry many times."""
    if cached_folder(name) is not None:
        return
    try:
        huggingface_hub.HfApi().model_info(name, timeout=2)
        return
    except errors.GatedRepoError:
        return  # loading its files will tell more
    except (errors.HFValidationError, errors.RepositoryNotFoundError):
        why = "is neither a folder nor a repository of the hub (or it is private: hf auth login)"
    except Exception:  # the HTTP library, and so its errors, may vary
        why = "is neither a folder nor in the cache, and the hub could not be reached"
    raise ValueError(f"model: {name} {why}")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a repository in the local cache, or None, without asking the hub."""
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (errors.HFValidationError, OSError):  # LocalEntryNotFoundError is one
        return None


def resolve_folder(where: str | Path) -> Path:
    """Return a folder, or that of a repository given by its hub id."""
    return fetch(str(where)) if names(str(where)) else Path(where)


def push(name: str, save: Callable[[Path], Any], private: bool | None = None) -> str:
    """Write a folder with `save` and upload it to repository `name`, which is created if needed. Returns the URL."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        api = huggingface_hub.HfApi()
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by visspec")
    return str(url)
