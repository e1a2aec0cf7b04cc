"""Who may look at the dashboard."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from embedctl_config.address import address_of
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings, expanded


def allowed_users(settings: Settings) -> list[str]:
    """The users who may look, as `user:password`; empty if everyone on this machine may. Raises SettingsError if other
    machines can reach the dashboard, and it has no users; or `flower_auth_file` is not valid."""
    if settings.flower_auth_file:
        return _read_users(expanded(settings.flower_auth_file, "flower_auth_file"))
    if not is_loopback(address_of(settings.flower_address, "flower_address").host):
        raise SettingsError(
            f"flower_address: {settings.flower_address!r} can be reached from other machines, and the dashboard would "
            "ask nobody for a password. Write a line `user:password` into a file that only you can read, and name it "
            "with --auth-file or EMBEDCTL_FLOWER_AUTH_FILE; or listen at 127.0.0.1"
        )
    return []


def is_loopback(host: str) -> bool:
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
        # The error would show a part of the password. Browsers encode characters beyond ASCII differently.
        raise SettingsError(f"flower_auth_file: {path}: use ASCII characters only") from None
    users = []
    for number, line in enumerate(lines, 1):
        user, _, password = line.partition(":")
        if user and password:
            users.append(line)
        elif line.strip():
            raise SettingsError(f"flower_auth_file: {path}, line {number}: expected `user:password`")
    if not users:
        raise SettingsError(f"flower_auth_file: {path} names no user: write lines `user:password`")
    return users
