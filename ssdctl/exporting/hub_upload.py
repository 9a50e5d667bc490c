"""Upload a folder to a model repository of the Hugging Face Hub, as one commit. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssdctl.download.hub import HubReference, endpoint, hub_error, hub_package, no_progress_bars
from ssdctl.errors import NetworkError


def upload_folder(
    reference: HubReference, folder: Path, names: Sequence[str], *, is_private: bool, message: str
) -> str:
    """Create the repository if it does not exist, and commit the files; return the commit's URL.

    Args:
        reference: The repository, and the branch to commit to.
        folder: Where the files are.
        names: Their names in the folder and in the repository.
        is_private: Of a repository that is created.
        message: Of the commit.

    Raises:
        UsageError: The Hub refuses the token, or there is none.
        NetworkError: The Hub cannot be reached, or failed; nothing was committed.
    """
    hub = hub_package()
    address = endpoint(hub)
    api = hub.HfApi(endpoint=address)
    try:
        with no_progress_bars(hub):
            api.create_repo(reference.repo, private=is_private or None, exist_ok=True)
            commit = api.create_commit(
                reference.repo,
                operations=[hub.CommitOperationAdd(name, str(folder / name)) for name in names],
                commit_message=message,
                revision=reference.revision,
            )
    except (hub.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__  # an upload that fails is a RuntimeError
        reason = cause if isinstance(cause, Exception) else error
        failure = hub_error(hub, reason, str(reference), f"{address}/{reference.repo}")
        if isinstance(failure, NetworkError):
            failure.hint = "nothing was committed; run it again"
        raise failure from None
    url: str = commit.commit_url
    return url
