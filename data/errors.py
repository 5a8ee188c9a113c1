"""The only error type that a user of the data tools sees."""


class DataError(Exception):
    """An error in the input: the problem with its place, and the fix."""

    def __init__(self, what, fix):
        super().__init__(what, fix)  # both as arguments, so that it travels between processes
        self.what = what
        self.fix = fix

    def __str__(self):
        return f"{self.what}\n  fix: {self.fix}"
