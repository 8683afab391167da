"""Errors that a user can fix: one sentence that names what, where and the remedy."""


class UserError(Exception):
    """A mistake that its user can fix: one sentence with the key and the remedy."""


class RunStopped(UserError):  # noqa: N818  (named for what happened)
    """A run that stopped itself, saved, in all of its processes alike."""


class ProcessAbsent(UserError):  # noqa: N818  (named for what happened)
    """Another process of the run has not come: the same command may yet succeed."""


class SettingsError(UserError, ValueError):
    """A setting, or a combination of settings, that cannot be used."""
