"""The names of a model: the one that a worker was started with, and the other spelling of its repository.

The worker decides this, because it has the files. It consumes a queue for each name, so a job reaches it whichever
spelling was given, and whether it was submitted before or after the worker's start. A name that leads to other files
here has a queue that this worker does not consume.
"""

from __future__ import annotations

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.model_names import other_spelling
from embedctl_config.settings import Settings
from embedctl_workers.models.files import ModelFiles, find_folder, fingerprint_of


def names_of(files: ModelFiles, settings: Settings) -> tuple[str, ...]:
    """The names that lead to these files here: the model's own, and its other spelling unless that differs.

    The other spelling differs if a local folder or an entry of the settings gives it files with other contents, or if
    its entry pins another fingerprint.
    """
    other = other_spelling(files.name)
    if other is None:
        return (files.name,)
    entry = settings.models.get(other, ModelEntry())
    try:
        folder = find_folder(other, entry)
        same = folder.resolve() == files.folder.resolve() or fingerprint_of(folder, entry.pooling) == files.fingerprint
    except (ModelError, SettingsError, ImportError, OSError):  # it leads nowhere
        same = False
    return (files.name, other) if same and entry.fingerprint in ("", files.fingerprint) else (files.name,)
