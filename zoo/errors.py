"""The one exception for mistakes that a user can cure."""


class UserError(Exception):
    """A mistake of the user, told in one line that names the place and the cure.

    Front doors print the message as ``error: <message>`` and exit with status 2; they never show a traceback
    for it. Raise it for bad files, words and settings, not for faults of the program.
    """
