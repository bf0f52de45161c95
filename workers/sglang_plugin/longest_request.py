"""Requests for which a worker's pool has no room, however long they wait, are refused.

SGLang 0.5.16 accepts prompts up to its whole pool, but its prefill half begins one only with a page
to spare, and its decode half only with ``--num-reserved-decode-tokens`` to spare; a request that
decode has retracted resumes with as many. One that is longer stays first in a queue for ever, each
leg renews the other's lease, and nothing behind it is served.
"""

from __future__ import annotations

from typing import Any

from tpla.core.config import Role
from tpla.core.errors import ConfigError

_INPUT_MARGIN = 5
"""Tokens that SGLang leaves between the longest prompt and the longest request."""


def limit_to_pool(role: Role, scheduler: Any) -> None:
    """Lower the scheduler's limits, by which it refuses prompts and ends answers, to its pool's.

    Raises:
        ConfigError: no request would fit.
    """
    page = scheduler.page_size
    pool = scheduler.max_total_num_tokens // page * page
    if role is Role.PREFILL:
        # PrefillAdder wants room for the prompt, one token and one page, and a token more.
        longest_input = pool - page - 2
    else:
        reserved = scheduler.server_args.num_reserved_decode_tokens
        longest = (pool - reserved) // page * page
        scheduler.max_req_len = min(scheduler.max_req_len, longest)
        longest_input = longest - _INPUT_MARGIN
        if longest_input < 1:
            raise ConfigError(
                f"a pool of {pool} tokens, of which --num-reserved-decode-tokens keeps {reserved} "
                "free, holds no request; raise --max-total-tokens, or reserve fewer"
            )
    # Prompts of this length are refused, too.
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, longest_input + 1)
