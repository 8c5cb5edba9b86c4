"""Checkpoints by their hub id: configurations and safetensors alone, through huggingface_hub and its cache."""

from __future__ import annotations

import re
from pathlib import Path

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # of a repository: owner/name
WANTED = ["*.json", "*.safetensors"]


def names(text: str) -> bool:
    """Whether a text has the form of a hub id and is no path that is there."""
    return ID.fullmatch(text) is not None and not Path(text).exists()


def fetched(name: str) -> Path:
    """The folder of a repository in the local cache, which is filled if the hub can be asked.

    Raises ValueError if there is no such repository, if it wants a login, or if it is not cached and there is no
    connection.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except GatedRepoError:
        why = "asks for a login with access to it (hf auth login)"
    except RepositoryNotFoundError:
        why = "is not on the hub, or is private and asks for a login (hf auth login)"
    except LocalEntryNotFoundError:
        why = "is not in the cache, and the hub could not be reached"
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        why = f"could not be fetched ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    raise ValueError(f"drafter: {name} {why}, expected a folder, or a repository of safetensors that can be read")
