"""Keeps the texts of Redis' scripts. Otherwise each command would make those that it needs."""

from functools import cache

from embedctl.operating.acl import OF_ADMIN, USERS
from embedctl.store import scripts

scripts.script_text = cache(scripts.script_text)
for name in OF_ADMIN.union(*(user.scripts for user in USERS.values())):
    scripts.script_text(name)
