"""The one exception for what the user can mend: a script prints it as one line and exits 1.

    raise UserError("no shards; --shard_path ./test_shards/; make some with python -m common.make_shards")
"""


class UserError(Exception):
    """A mistake or a fault outside this code, told as `what; where (shard, key, flag); what to do`."""


class UsageError(UserError):
    """Flags that make no sense, alone or together or on this machine: a script exits 2."""
