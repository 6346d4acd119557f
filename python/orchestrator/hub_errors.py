"""Errors of uploading to the Hugging Face Hub, as sentences that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestrator import _native
from orchestrator.command_error import CommandError, ExitCode

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

LOG_IN = "make one with write access on https://huggingface.co/settings/tokens, and `hf auth login` or set HF_TOKEN"
AGAIN = "Push again: files that have arrived are not sent again"


@contextmanager
def explained(api: HfApi, repository: str) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into a `CommandError`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise CommandError(f"pushing to {repository} needs a token of the Hub: {LOG_IN}") from error
    except errors.OfflineModeIsEnabled as error:
        raise CommandError("pushing needs the network: HF_HUB_OFFLINE is set, unset it") from error
    except errors.HFValidationError as error:
        raise CommandError(f"{repository} is not a name that the Hub accepts: {error}") from error
    except RuntimeError as error:  # from a thread that sends a file; the address it was given may have expired
        why = unreachable(error.__cause__ or error, api.endpoint)
        raise CommandError(f"a file was not sent to {api.endpoint}: {why}. {AGAIN}", ExitCode.UNEXPECTED) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(error, api, repository) from error
    except Exception as error:
        # Errors of the network are those that HfHubHTTPError inherits from: the HTTP library's, and OSError.
        if not isinstance(error, (*errors.HfHubHTTPError.__bases__, ValueError)):
            raise
        message = f"the push of {repository} to {api.endpoint} failed: {unreachable(error, api.endpoint)}. {AGAIN}"
        raise CommandError(message, ExitCode.UNEXPECTED) from error


def said_by_the_hub(error: HfHubHTTPError) -> str:
    """Return what the Hub says of an error, in parentheses; empty if it says nothing."""
    return f" ({' '.join(error.server_message.split())})" if error.server_message else ""


def unknown_token(error: HfHubHTTPError) -> str:
    """Return the sentence for a token that the Hub does not know: where it comes from and what to do."""
    token = _native.hub_token()
    if token is None:
        return f"the Hub asks for a token{said_by_the_hub(error)}: {LOG_IN}"
    origin, remedy = token
    answer = said_by_the_hub(error)
    return f"the Hub does not accept the token {origin}{answer}, it is wrong, expired or revoked: {remedy}"


def unreachable(error: BaseException, url: str) -> str:
    """Return an error of the network, with the proxy by which the URL is reached, if there is one."""
    proxy = _native.hub_proxy(url)
    return described(error) + (f"; it goes by {proxy}: is that proxy right?" if proxy else "")


def _refusal(error: HfHubHTTPError, api: HfApi, repository: str) -> CommandError:
    from huggingface_hub.errors import RepositoryNotFoundError

    status, answer = error.response.status_code, said_by_the_hub(error)
    if status == 401:
        return CommandError(f"{unknown_token(error)}. It must have write access")
    if status in (402, 403) or isinstance(error, RepositoryNotFoundError):
        return CommandError(f"the token may not write to {repository}{answer}: {_writable(api)}, or with another token")
    if status == 400:
        return CommandError(f"the Hub refuses {repository}{answer}")
    if status in (409, 412):
        message = f"{repository} was changed by somebody else meanwhile{answer}. {AGAIN}"
        return CommandError(message, ExitCode.UNEXPECTED)
    message = f"the push of {repository} failed: the Hub answered {status}{answer}. {AGAIN}"
    return CommandError(message, ExitCode.UNEXPECTED)


def _writable(api: HfApi) -> str:
    """Return advice on whose repositories the token's owner can push to."""
    try:
        user = api.whoami()
    except Exception:  # why the push failed matters more
        return "push to a repository of your own"
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    return f"push as {' or '.join(f'{owner}/NAME' for owner in owners)}"


def described(error: BaseException) -> str:
    """Return an error's type and the first line of what it says, without the system's number."""
    lines = re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
