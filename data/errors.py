"""The only error type shown to a user of the data tools."""


class DataError(Exception):
    """An error in the input: the problem with its place, and the fix."""

    def __init__(self, what, fix):
        super().__init__(what, fix)  # both as arguments, so that pickle can send the error to another process
        self.what = what
        self.fix = fix

    def __str__(self):
        return f"{self.what}\n  fix: {self.fix}"
