"""Who may look at the dashboard."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings, expanded


def allowed_users(settings: Settings) -> list[str]:
    """Those who may look, as `user:password`; none where whoever is on this machine may.

    Raises:
        SettingsError: other machines reach the dashboard and nobody would be asked, or `flower_auth_file` is not right.
    """
    if settings.flower_auth_file:
        return _read_users(expanded(settings.flower_auth_file, "flower_auth_file"))
    if not is_loopback(settings.flower_address):
        raise SettingsError(
            f"flower_address: {settings.flower_address!r} is reached from other machines, and nobody would be asked "
            "who they are. Write a line `user:password` into a file that only you can read and name it with "
            "--auth-file or EMBEDCTL_FLOWER_AUTH_FILE; or listen at 127.0.0.1"
        )
    return []


def is_loopback(host: str) -> bool:
    """Whether this is a name by which only processes of this machine reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read_users(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise SettingsError(f"flower_auth_file: {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # The error would show a part of the password. Browsers do not agree on how to send anything else.
        raise SettingsError(f"flower_auth_file: {path}: use ASCII characters only") from None
    users = []
    for number, line in enumerate(lines, 1):
        user, _, password = line.partition(":")
        if user and password:
            users.append(line)
        elif line.strip():
            raise SettingsError(f"flower_auth_file: {path}, line {number}: expected `user:password`")
    if not users:
        raise SettingsError(f"flower_auth_file: {path} names nobody: write lines `user:password`")
    return users
