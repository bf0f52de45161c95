"""Requests that decode has taken its pages from, to go on with when there are pages again.

What SGLang 0.5.16 keeps of one is its rows and its tokens. It waits for room with everything else
standing still, and goes on as if it were new.
"""

from __future__ import annotations

from typing import Any


def take_transferred_too(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.process_decode_queue``, which ends where a retracted request must wait.

    Transfers that have ended hold the pages and the reserve that it waits for. SGLang's loop for
    pipelines takes them at any time, and so does this.
    """
    if scheduler.disagg_decode_prealloc_queue.retracted_queue:
        transferred = scheduler.disagg_decode_transfer_queue.pop_transferred()
        scheduler.waiting_queue.extend(transferred)


def mark_accepted(result: None, grammar: Any, token: int) -> None:
    """After ``GuidanceGrammar.accept_token``, which is the only one of SGLang not to say so.

    The last token of a request that goes on is accepted again unless its grammar has one.
    """
    grammar.current_token = token
