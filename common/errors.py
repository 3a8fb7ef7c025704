"""The one exception for what the user can mend: a script prints it as one line and exits 1. And how others' words get
into such a line.

    raise UserError("no shards; --shard_path ./test_shards/; make some with python -m common.make_shards")
"""

MAX_NAME, MAX_LINE = 200, 4000  # letters that are shown


def printable(text: str, most: int = MAX_NAME) -> str:
    """A key or a name from a tar as a terminal may show it: the middle of a long one left out, and escapes for what is
    no letter or sign: a line feed, an escape sequence, the bytes of another encoding."""
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most // 2) :]}"
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def one_line(text: object) -> str:
    """A message on one line, whatever is in it."""
    return printable(" ".join(str(text).split()), MAX_LINE)


class UserError(Exception):
    """A mistake or a fault outside this code, told as `what; where (shard, key, flag); what to do`."""


class UsageError(UserError):
    """Flags that make no sense, alone or together or on this machine: a script exits 2."""
