"""A model's folder on the Hugging Face hub."""

import os
from pathlib import Path

from holdfast.errors import RunError, UserError

FORBIDDEN = (401, 403)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: no name of a repository; expected NAME or OWNER/NAME ({error})") from None


def push_folder(folder: Path, name: str, message: str, *, private: bool = False) -> str:
    """Put a folder into a repository of models, made where there is none; returns its address.

    One commit holds all files, so that a push that fails changes nothing there.

    Args:
        name: NAME or OWNER/NAME.
        message: what the commit says.
        private: of a repository that is made.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    # The errors of the HTTP library that the hub's own uses, and of sockets.
    unreachable: tuple[type[Exception], ...] = HfHubHTTPError.__bases__
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    again = f"{folder} is complete; `hf upload {name} {folder}` tries again"
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    except LocalTokenNotFoundError:
        raise UserError(f"--push {name}: nobody is logged in; run `hf auth login` or set HF_TOKEN; {again}") from None
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in FORBIDDEN:
            raise UserError(
                f"--push {name}: the hub refuses it ({code}): is HF_TOKEN allowed to write? {again}"
            ) from None
        raise RunError(f"--push {name}: the hub answered {code}; {again}") from None
    except unreachable as error:
        raise RunError(f"--push {name}: the hub cannot be reached ({type(error).__name__}); {again}") from None
    return str(made)
