"""The one kind of error that a user of the data tools sees."""


class DataError(Exception):
    """Something is wrong with the input: what and where, and how to mend it."""

    def __init__(self, what, fix):
        super().__init__(what, fix)  # both as arguments, so that it travels between processes
        self.what = what
        self.fix = fix

    def __str__(self):
        return f"{self.what}\n  fix: {self.fix}"
