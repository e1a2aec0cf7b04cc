"""Settings, wire formats, Redis keys and errors: what producers and workers agree on.

Importing this package loads neither celery nor numpy; only :mod:`embedctl_config.celery_app` needs celery.
"""

__version__ = "0.1.0"
